"""``commlens compare``: report what changed between two traces, or between two dumps of a job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.atomic_write import write_whole
from commlens.commands.progress import working
from commlens.errors import CommandError
from commlens.reports.json_report import print_json
from commlens.text import printable

if TYPE_CHECKING:
    from commlens.dumps.discover import DumpFiles

EXIT_SAME = 0
EXIT_CHANGED = 1
EXIT_UNREADABLE = 3


class CompareCommand:
    """Report what changed between two traces, or between two dumps of a job.

    Traces: report collectives that are new, gone, moved or changed. Lines of code and the order of
    issue are ignored. A difference in time that exceeds the noise is reported, but does not count
    as a change. Folders with one file per rank are compared rank by rank. A golden file is a trace.

    Dumps, from any source: report which ranks progressed from the first to the second.

    Exit status: 0 if nothing changed, 1 if something did, 2 for wrong usage or a file that is
    neither trace nor dump, 3 if no rank of one of the dumps could be read.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "before",
            metavar="BEFORE",
            help="a trace file, a folder with one per rank, or a job's dump",
        )
        parser.add_argument("after", metavar="AFTER", help="the same kind, taken later")
        parser.add_argument(
            "--json",
            action="store_true",
            help=(
                "print the changes as JSON (schema commlens.comparison/1, for dumps"
                " commlens.movement/1)"
            ),
        )
        parser.add_argument(
            "-o",
            "--html",
            metavar="FILE",
            help="write one HTML page with the changes and both traces side by side",
        )
        parser.add_argument("--force", action="store_true", help="overwrite an existing file")

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.dumps.discover import discover

        found = [discover([path]) for path in (arguments.before, arguments.after)]
        are_dumps = [files.holds_dumps for files in found]
        if all(are_dumps):
            if arguments.html:
                raise CommandError(
                    "--html is for traces; commlens diagnose --html writes a page for a dump."
                )
            return _compare_dumps(found, (arguments.before, arguments.after), json=arguments.json)
        if any(are_dumps):
            dump, trace = (arguments.before, arguments.after)[:: 1 if are_dumps[0] else -1]
            raise CommandError(
                f"{dump} is a dump and {trace} is not: give two dumps of one job, or two traces."
            )
        from commlens.traces.diff_ranks import compare_page, compare_ranks
        from commlens.traces.files import read_ranks

        with working("Comparing traces"):
            before, notes = read_ranks([arguments.before])
            after, more_notes = read_ranks([arguments.after])
            comparison = compare_ranks(before, after)
        comparison.notes += [*notes, *more_notes]
        if arguments.html:
            page = compare_page(
                before,
                after,
                comparison,
                names=(printable(arguments.before), printable(arguments.after)),
            )
            write_whole(Path(arguments.html), page, overwrite=arguments.force)
            print(f"commlens: Wrote {arguments.html}: open it in a browser.", file=sys.stderr)
        if arguments.json:
            print_json(comparison)
        else:
            from commlens.reports.trace_terminal import print_comparison

            print_comparison(comparison)
        return EXIT_CHANGED if comparison else EXIT_SAME


def _compare_dumps(found: list[DumpFiles], names: tuple[str, str], *, json: bool) -> int:
    from commlens.diagnosis.views.dump_diff import (
        compare_positions,
        other_job,
        position_of,
        shows_position,
    )
    from commlens.dumps.parallel import read_ranks

    problems = [text for files in found for text in files.problems]
    with working("Comparing dumps"):
        before, after = (
            [position_of(rows) for rows in read_ranks(files, problems) if shows_position(rows)]
            for files in found
        )
    if difference := other_job(before, after):
        first, second = map(printable, names)
        raise CommandError(
            f"{first} and {second} are dumps of different jobs: {difference}. Give two dumps of one"
            " job."
        )
    movement = compare_positions(before, after)
    movement.notes += dict.fromkeys(problems)
    if json:
        print_json(movement)
    else:
        from commlens.reports.trace_terminal import print_differences

        print_differences([one.sentence for one in movement.ranks], movement.answer)
        for note in movement.notes:
            print(note)
    if not before or not after:
        return EXIT_UNREADABLE
    return EXIT_CHANGED if movement else EXIT_SAME
