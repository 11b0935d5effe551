"""``commlens doctor``."""

from __future__ import annotations

import argparse


class DoctorCommand:
    """Say what is here, which engine records, and what would not work.

    For a bug report, or before a job. Nothing is changed, and no compiler is called.
    """

    name = "doctor"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--config-file", metavar="FILE", help="this YAML file instead of the usual one")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print it. The exit status says nothing of what was found."""
        from commlens.launch.environment import examine

        report = examine(arguments.config_file)
        width = max(len(name) for name, _ in report.facts)
        for name, value in report.facts:
            first, *more = value.splitlines() or [""]
            print(f"{name:<{width}}  {first}")
            for line in more:
                print(f"{'':<{width}}  {line}")
        print()
        if report.problems:
            print("What would not work here:")
            for problem in report.problems:
                print(f"  - {problem}")
        else:
            print("Nothing was found that would not work here.")
        return 0
