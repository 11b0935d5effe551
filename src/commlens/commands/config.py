"""``commlens config``."""

from __future__ import annotations

import argparse
import sys

from commlens import config


class ConfigCommand:
    """Show the settings in force and where each of them comes from.

    A setting comes from its default, a YAML file, the environment or the command line, the last that has it.
    """

    name = "config"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="show")
        show = actions.add_parser("show", help="print every setting, its value and its origin", allow_abbrev=False)
        show.add_argument("--config-file", metavar="FILE", help="read this YAML file instead of the usual one")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the table, and on standard error what was ignored."""
        resolved = config.load_settings(config_file=arguments.config_file)
        rows = [(name, _shown(getattr(resolved.settings, name)), resolved.origins[name]) for name in config.NAMES]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, value, origin in rows:
            print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
        for warning in resolved.warnings:
            print(f"commlens: {warning}", file=sys.stderr)
        return 0


def _shown(value: object) -> str:
    """A value as it would be written in YAML."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
