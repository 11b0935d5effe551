"""``commlens config``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from commlens import config
from commlens.atomic_write import write_whole
from commlens.commands.table import print_table
from commlens.errors import CommandError

QUESTIONS: Final = {name: accepts for name, accepts in config.ACCEPTED.items() if accepts.question}
"""The settings that are asked about."""
_YES_NO: Final = {"y": "yes", "n": "no"}
_SWITCH: Final = {True: "yes", False: "no"}


class ConfigCommand:
    """Write the settings file by asking questions; config show prints the settings in use.

    If a setting is given in several places, the last of these wins: its default, the YAML file, the
    environment, the command line.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--config-file", metavar="FILE", help="use this YAML file instead of the usual one"
        )
        parser.add_argument(
            "-y",
            "--yes",
            action="store_true",
            help="ask nothing: write the defaults; with --force, a file keeps its values",
        )
        parser.add_argument(
            "-f", "--force", action="store_true", help="overwrite the file without asking"
        )
        parser.usage = (
            "commlens config [-h] [--config-file FILE] [-y] [-f]\n       commlens config show [-h]"
            " [--config-file FILE]"
        )
        purpose = "print every setting with its value and where it was set"
        actions = parser.add_subparsers(
            dest="action",
            title="instead of writing the file",
            metavar="show",
            help=purpose,
            prog="commlens config",
        )
        show = actions.add_parser("show", description=f"P{purpose[1:]}.", allow_abbrev=False)
        show.add_argument(
            "--config-file",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="read this YAML file instead of the usual one",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.action == "show":
            return _show(arguments.config_file)
        return _write(arguments.config_file, take_defaults=arguments.yes, force=arguments.force)


def _show(config_file: str | None) -> int:
    resolved = config.load_settings(config_file=config_file)
    rows = [
        (name, shown(getattr(resolved.settings, name)), resolved.origins[name])
        for name in config.NAMES
    ]
    print_table(rows)
    for warning in resolved.warnings:
        print(f"commlens: {warning}", file=sys.stderr)
    return 0


def _write(config_file: str | None, *, take_defaults: bool, force: bool) -> int:
    path, _ = config.config_path(os.environ, config_file)
    if path is None:
        raise CommandError(
            "Neither XDG_CONFIG_HOME nor HOME is set: name the settings file with --config-file"
            " FILE."
        )
    exists = path.exists()
    if exists and take_defaults and not force:
        raise CommandError(f"File already exists, will not overwrite without --force: {path}")
    if not take_defaults and not sys.stdin.isatty():
        raise CommandError(
            "Cannot ask questions, because standard input is not a terminal. `commlens config"
            " --yes` writes the file with the defaults."
        )
    present, kept = _present(path, exists, force)
    if take_defaults:
        answers = {name: getattr(present, name) for name in QUESTIONS}
    else:
        print(f"The answers go to {path}. Press Enter to keep the value in brackets.")
        try:
            answers = ask(present, input, print)
            if (
                exists
                and not force
                and input(f"\nOverwrite {path}? Comments will be lost. [y/N]: ").strip().lower()
                not in ("y", "yes")
            ):
                print("Nothing was written.")
                return 1
        except (EOFError, KeyboardInterrupt):
            print("\nNothing was written.")
            return 130
    write_whole(path, settings_file(answers, kept).encode())
    print(f"Wrote {path}")
    _print_overrides(path, answers)
    return 0


def _present(path: Path, exists: bool, force: bool) -> tuple[config.Settings, Mapping[str, Any]]:
    """Return the settings with the file's values, and the values that the file itself sets."""
    if not exists:
        return config.Settings(), {}
    try:
        resolved = config.load_settings(environ={}, config_file=path)
    except CommandError as error:
        if not force:
            raise CommandError(f"{error} `commlens config --force` replaces the file.") from None
        return config.Settings(), {}
    kept = {
        name: getattr(resolved.settings, name)
        for name in config.NAMES
        if resolved.origins[name] == str(path)
    }
    return resolved.settings, kept


def _print_overrides(path: Path, answers: Mapping[str, Any]) -> None:
    """Print which answers have no effect here, because the environment overrides the file."""
    resolved = config.load_settings(config_file=path, strict=False)
    for name in answers:
        origin = resolved.origins[name]
        if origin not in (str(path), config.DEFAULT):
            value = shown(getattr(resolved.settings, name))
            print(f"commlens: {name} is still {value} here, because {origin} overrides the file.")
    usual, _ = config.config_path(os.environ, None)
    if usual is None or usual.resolve() != path.resolve():
        print(f"To use it, name it: --config-file {path}, or COMMLENS_CONFIG_FILE={path}.")
    else:
        print("`commlens config show` prints the settings in force.")


def ask(
    present: config.Settings, read: Callable[[str], str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Ask every question, with the present values as the defaults, and return the answers by
    setting.

    ``read`` shows a prompt and returns a line; its EOFError and KeyboardInterrupt are passed on.
    """
    answers: dict[str, Any] = {}
    for name, accepts in QUESTIONS.items():
        value = getattr(present, name)
        say(f"\n{accepts.question}\n  {accepts.explanation}")
        while True:
            is_switch = isinstance(value, bool)
            kept = _SWITCH[value] if is_switch else shown(value)
            text = read(f"  {name} [{kept}]: ").strip()
            try:
                answers[name] = (
                    accepts.parse(_YES_NO.get(text.lower(), text) if is_switch else text)
                    if text
                    else value
                )
                break
            except (ValueError, TypeError, OverflowError):
                say(f"  That is not accepted. Enter {'yes or no' if is_switch else accepts.words}.")
    return answers


def settings_file(answers: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """Return the text of the settings file.

    Args:
        answers: to the questions, by setting.
        kept: the settings of the previous file; those without a question are kept.
    """
    lines = [
        "# Settings of commlens, written by `commlens config`. Run it again to change them.",
        (
            "# COMMLENS_* variables and the command line override this file; `commlens config show`"
            " prints the settings in force."
        ),
    ]
    for name, accepts in QUESTIONS.items():
        lines += [
            "",
            f"# {accepts.question}",
            f"# {accepts.explanation}",
            _line(name, answers[name]),
        ]
    others = [name for name in config.NAMES if name in kept and name not in answers]
    if others:
        lines += [
            "",
            "# Kept from the previous file:",
            *(_line(name, kept[name]) for name in others),
        ]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Return a value as YAML would write it; ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _line(name: str, value: Any) -> str:
    import yaml

    if value is None:
        return f"{name}:"
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    text: str = yaml.safe_dump({name: plain}, allow_unicode=True, width=10_000)
    return text.rstrip("\n")
