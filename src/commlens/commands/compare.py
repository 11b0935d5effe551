"""``commlens compare``: what is different between two traces, in words."""

from __future__ import annotations

import argparse

EXIT_SAME = 0
EXIT_CHANGED = 1


class CompareCommand:
    """Say what changed from one trace to another, in words.

    Collectives that are new, gone, moved, or carry something else. Times, lines of code and the order of issue do not count.
    Folders with one file for each rank are compared rank by rank. Golden files of tests are traces, too.
    Exit status: 0 nothing changed, 1 something did, 2 wrong usage or a file that is no trace.
    """

    name = "compare"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""
        parser.add_argument("before", metavar="BEFORE", help="a trace file, or a folder with one for each rank")
        parser.add_argument("after", metavar="AFTER", help="the other one")
        parser.add_argument("--json", action="store_true", help="print the changes as JSON (schema commlens.comparison/1)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Read, compare, print."""
        from commlens.reading.compare_ranks import compare_ranks
        from commlens.reading.paths import read_ranks

        before, after = read_ranks([arguments.before]), read_ranks([arguments.after])
        comparison = compare_ranks(before.ranks, after.ranks)
        comparison.notes += [*before.notes, *after.notes]
        if arguments.json:
            import msgspec

            print(msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode())
        else:
            from commlens.reports.trace_terminal import print_comparison

            print_comparison(comparison)
        return EXIT_CHANGED if comparison else EXIT_SAME
