"""``commlens diagnose``: dumps in, verdict out."""

from __future__ import annotations

import argparse
import math

from commlens.model.verdict import Verdict

EXIT_NOTHING_WRONG = 0
EXIT_FAULT = 1


class DiagnoseCommand:
    """Say from dumps or black boxes what is wrong, and which rank did it.

    Exit status: 0 nothing is wrong (or the ranks wait for one that visibly works), 1 a fault was found, 2 wrong usage, 3 not
    enough evidence could be read.
    """

    name = "diagnose"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""
        parser.add_argument("paths", nargs="+", metavar="PATH", help="dump folders, or black boxes (rank*.box), in any order")
        parser.add_argument("--json", action="store_true", help="print the verdict as JSON (schema commlens.verdict/1)")
        parser.add_argument(
            "--stalled-after", type=_seconds, default=1.0, metavar="S",
            help="a collective in flight for less than S seconds in a process that runs is not stuck (default: 1)",
        )  # fmt: skip

    def run(self, arguments: argparse.Namespace) -> int:
        """Read the evidence, diagnose, print."""
        from commlens.diagnose.paths import diagnose_paths

        verdict = diagnose_paths(arguments.paths, stalled_after_s=arguments.stalled_after)
        if arguments.json:
            from commlens.reports.json_report import print_json

            print_json(verdict)
        else:
            from commlens.reports.terminal import print_verdict

            print_verdict(verdict)
        return exit_status(verdict)


def exit_status(verdict: Verdict) -> int:
    """1 for a fault, else 0."""
    return EXIT_FAULT if verdict.is_fault else EXIT_NOTHING_WRONG


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
