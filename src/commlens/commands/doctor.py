"""``commlens doctor``."""

from __future__ import annotations

import argparse

from commlens.commands.table import print_table


class DoctorCommand:
    """Check this environment: versions, the recording engine, and what would not work.

    Run it before a job, or for a bug report. It changes nothing and calls no compiler.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--config-file", metavar="FILE", help="use this YAML file instead of the usual one"
        )
        parser.add_argument(
            "--node",
            action="store_true",
            help="show the hardware of this node instead: networks, GPUs, memory, the kernel's log",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report. The exit status is 0 even if there are problems."""
        if arguments.node:
            from commlens.commands.health_table import print_health
            from commlens.config import load_settings
            from commlens.watch.node_health import root_of, topology_of

            settings = load_settings(config_file=arguments.config_file).settings
            print_health(root_of(settings), topology_of(settings))
            return 0
        from commlens.launch.environment import examine

        report = examine(arguments.config_file)
        print_table(report.facts)
        print()
        if report.problems:
            print("What would not work here:")
            for problem in report.problems:
                print(f"  - {problem}")
        else:
            print("No problems found.")
        return 0
