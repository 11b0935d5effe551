"""``commlens config``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commlens import config
from commlens.atomic_write import write_whole
from commlens.commands import questionnaire
from commlens.errors import CommandError


class ConfigCommand:
    """Ask a few questions and write the settings file; config show prints what is in force.

    A setting comes from its default, a YAML file, the environment or the command line, the last that has it.
    """

    name = "config"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--config-file", metavar="FILE", help="this YAML file instead of the usual one")
        parser.add_argument("-y", "--yes", action="store_true", help="ask nothing: keep what the file has, and the defaults for the rest")
        parser.add_argument("-f", "--force", action="store_true", help="overwrite the file without asking")
        actions = parser.add_subparsers(dest="action", metavar="show")
        show = actions.add_parser("show", help="print every setting, its value and its origin", allow_abbrev=False)
        show.add_argument("--config-file", metavar="FILE", default=argparse.SUPPRESS, help="read this YAML file instead of the usual one")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the table, or ask."""
        if arguments.action == "show":
            return _show(arguments.config_file)
        return _write(arguments.config_file, take_defaults=arguments.yes, force=arguments.force)


def _show(config_file: str | None) -> int:
    """Print the settings in force, and on standard error what was ignored."""
    resolved = config.load_settings(config_file=config_file)
    rows = [(name, questionnaire.shown(getattr(resolved.settings, name)), resolved.origins[name]) for name in config.NAMES]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    for warning in resolved.warnings:
        print(f"commlens: {warning}", file=sys.stderr)
    return 0


def _write(config_file: str | None, *, take_defaults: bool, force: bool) -> int:
    path, _ = config.config_path(os.environ, config_file)
    if path is None:
        raise CommandError("Where is the settings file to be? Neither XDG_CONFIG_HOME nor HOME is set: name it with --config-file FILE.")
    exists = path.exists()
    if exists and take_defaults and not force:
        raise CommandError(f"{path} exists already, and is not overwritten without --force.")
    if not take_defaults and not sys.stdin.isatty():
        raise CommandError(
            "Nobody can be asked, because standard input is not a terminal. `commlens config --yes` writes the file with its defaults."
        )
    present, kept = _present(path, exists, force)
    if take_defaults:
        answers = {question.name: getattr(present, question.name) for question in questionnaire.QUESTIONS}
    else:
        print(f"The answers go to {path}. Enter keeps what stands in brackets.")
        try:
            answers = questionnaire.ask(present, input, print)
            if exists and not force and input(f"\nOverwrite {path}? Comments in it are lost. [y/N]: ").strip().lower() not in ("y", "yes"):
                print("Nothing was written.")
                return 1
        except (EOFError, KeyboardInterrupt):
            print("\nNothing was written.")
            return 130
    write_whole(path, questionnaire.settings_file(answers, kept).encode())
    print(f"Written: {path}")
    _say_what_wins(path, answers)
    return 0


def _present(path: Path, exists: bool, force: bool) -> tuple[config.Settings, Mapping[str, Any]]:
    """What the file has, and of that what it sets itself."""
    if not exists:
        return config.Settings(), {}
    try:
        resolved = config.load_settings(environ={}, config_file=path)
    except CommandError as error:
        if not force:
            raise CommandError(f"{error} `commlens config --force` begins a new file in its place.") from None
        return config.Settings(), {}
    kept = {name: getattr(resolved.settings, name) for name in config.NAMES if resolved.origins[name] == str(path)}
    return resolved.settings, kept


def _say_what_wins(path: Path, answers: Mapping[str, Any]) -> None:
    """Answers that have no effect here, because something wins over the file."""
    resolved = config.load_settings(config_file=path, strict=False)
    for name in answers:
        origin = resolved.origins[name]
        if origin not in (str(path), config.DEFAULT):
            value = questionnaire.shown(getattr(resolved.settings, name))
            print(f"commlens: {name} is {value} here all the same, because {origin} is set.")
    usual, _ = config.config_path(os.environ, None)
    if usual is None or usual.resolve() != path.resolve():
        print(f"It is read where it is named: by --config-file, or by COMMLENS_CONFIG_FILE={path}.")
    else:
        print("`commlens config show` prints what is in force.")
