"""The options that `launch` and `run` share: settings on the command line, before the program."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from commlens.config import ACCEPTED, SAMPLE, Resolved, load_settings
from commlens.errors import CommandError, CommlensError, did_you_mean
from commlens.launch.new_warnings import new_warnings
from commlens.text import joined
from commlens.verification.sampling import EVERY

_WITH_HELP: Final = {name: accepts for name, accepts in ACCEPTED.items() if accepts.help}
OPTIONS: Final = (*_WITH_HELP, "check_numbers")
"""The settings that have an option."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings that make sense on a command line, and ``--config-file``, as a group of
    their own.
    """
    group = parser.add_argument_group(
        "commlens",
        "settings, which can also be set by COMMLENS_* variables or in the settings file",
    )
    for name, accepts in _WITH_HELP.items():
        flag = "--" + name.replace("_", "-")
        if not accepts.metavar:
            group.add_argument(
                flag,
                dest=f"commlens_{name}",
                action=argparse.BooleanOptionalAction,
                default=None,
                help=accepts.help,
            )
            # a whole option to argparse, since a value might be mistaken for the program, and the
            # program for a value
            if name == "debug":
                more = (
                    f"the same for every {EVERY}th collective of a group, and for the first of each"
                    " place in the program: costs less"
                )
                group.add_argument(
                    f"{flag}={SAMPLE}",
                    dest=f"commlens_{name}",
                    action="store_const",
                    const=SAMPLE,
                    help=more,
                )
        else:
            takes = (
                f"; accepts {accepts.words}"
                if accepts.metavar in ("SECONDS", "N", "SIGNAL")
                else ""
            )
            group.add_argument(
                flag,
                dest=f"commlens_{name}",
                metavar=accepts.metavar,
                help=accepts.help + takes,
            )
    add_optional_value(
        parser,
        group,
        "--check-numbers",
        "on",
        "compare the tensors that ranks must have alike after every 100th optimizer step;"
        " --check-numbers=HOW accepts every N steps, nan, every-op, tolerance=X, with commas"
        " between them",
    )
    group.add_argument(
        "--config-file",
        dest="commlens_config_file",
        metavar="FILE",
        help="use this settings file (YAML)",
    )


def add_optional_value(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    flag: str,
    without_value: str,
    help_text: str,
) -> None:
    """Add an option that is given with or without ``=VALUE``. argparse would take the program's
    name for an optional value, so each form that is given becomes an option without one.
    """
    dest = "commlens_" + flag.removeprefix("--").replace("-", "_")
    group.add_argument(flag, dest=dest, action="store_const", const=without_value, help=help_text)
    parse_optional: Any = parser._parse_optional

    def parse(argument: str) -> Any:
        if argument.startswith(f"{flag}=") and argument not in parser._option_string_actions:
            parser.add_argument(
                argument,
                dest=dest,
                action="store_const",
                const=argument.partition("=")[2],
                help=argparse.SUPPRESS,
            )
        return parse_optional(argument)

    vars(parser)["_parse_optional"] = parse


def settings_from(arguments: argparse.Namespace, **more: Any) -> Resolved:
    """Return the settings in force; those on the command line win.

    Args:
        arguments: the parsed options of :func:`add_settings`.
        more: settings of one command only; None if not given.

    Raises:
        ConfigError: a key is unknown or a value is bad, wherever it is set.
    """
    overrides: dict[str, Any] = {name: getattr(arguments, f"commlens_{name}") for name in OPTIONS}
    overrides.update(more)
    return load_settings(config_file=arguments.commlens_config_file, overrides=overrides)


def refuse_value(arguments: argparse.Namespace, program: str, *, module: bool) -> None:
    """Refuse the value of an option in the program's place: ``--debug``, ``--check-numbers`` and
    ``--trace`` take a value only after ``=``.

    Args:
        arguments: the parsed options of :func:`add_settings`.
        program: the script's path, or the module's name.
        module: it is a module's name.

    Raises:
        CommandError: there is no such program, and an option that was given takes this value.
    """
    if module or Path(program).exists():
        return
    for name, without_value in (("check_numbers", "on"), ("debug", True), ("trace", "all")):
        given = getattr(arguments, f"commlens_{name}", None)
        if given == without_value and _accepts(name, program):
            flag = "--" + name.replace("_", "-")
            raise CommandError(
                f"The program {program} cannot be read: there is no such file. If it is the value"
                f" of {flag}, write {shlex.quote(f'{flag}={program}')}."
            )


def _accepts(name: str, value: str) -> bool:
    try:
        ACCEPTED[name].parse(value)
    except (CommlensError, ValueError):
        return False
    return True


def program_from(given: Sequence[str], own_options: Collection[str], *, module: bool) -> list[str]:
    """Return the program and its arguments. All that stands after the program is the program's,
    whatever it is called.

    If an option of commlens is among the arguments, say so in one line on stderr, unless ``--``
    marks where the program begins.

    Args:
        given: the program and its arguments, perhaps after ``--``.
        own_options: the names of commlens's options.
        module: the program is a module's name.
    """
    if given[:1] == ["--"]:
        return list(given[1:])
    names = [argument.partition("=")[0] for argument in given[1:]]
    names = names[: names.index("--")] if "--" in names else names
    after = list(dict.fromkeys(name for name in names if name in own_options))
    if after:
        stands, gets = ("stands", "it") if len(after) == 1 else ("stand", "them")
        program = os.path.basename(given[0])  # noqa: PTH119 - a module's name is no path
        hint = (
            f"{joined(after)} {stands} after {program}, so {program} gets {gets}; "
            f"to give {gets} to commlens, put {gets} before {'-m' if module else 'the script'}."
        )
        for text in new_warnings([hint]):
            print(f"commlens: {text}", file=sys.stderr, flush=True)
    return list(given)


def own_options(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Return the names of the parser's options, for :func:`program_from`. Every program has
    ``--help``, and ``-m`` is Python's, too.
    """
    return frozenset(name for action in parser._actions for name in action.option_strings) - {
        "-h",
        "--help",
        "-m",
        "--module",
    }


def usage_error(parser: argparse.ArgumentParser, message: str) -> CommandError:
    """Return argparse's complaint as an error of ours: a sentence, with a suggestion for a misspelt
    option or choice.
    """
    see = f" `{parser.prog} --help` shows how to call it."
    kind, _, given = message.partition(": ")
    options = [option for action in parser._actions for option in action.option_strings]
    if kind == "unrecognized arguments":
        name = given.strip().partition(" ")[0].partition("=")[0]
        if not name.startswith("-"):
            return CommandError(f"{parser.prog} takes no argument {name!r} there.{see}")
        return CommandError(
            f"{parser.prog} has no option {name!r}.{_similar_options(name, options) or see}"
        )
    if kind == "the following arguments are required":
        one_of = {
            action.dest: f"one of {', '.join(action.choices)}"
            for action in parser._actions
            if action.choices
        }
        missing = [one_of.get(name, name) for name in given.split(", ")]
        return CommandError(f"{parser.prog} needs {', '.join(missing)}.{see}")
    name = _plain_name(kind.removeprefix("argument "))
    return CommandError(_value_error(parser.prog, name, given, options, see))


def _value_error(prog: str, name: str, given: str, options: Sequence[str], see: str) -> str:
    """Return a sentence for what argparse says of one argument."""
    if choice := re.match(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", given):
        choices = choice[2].replace("'", "")
        hint = did_you_mean(choice[1], choices.split(", "))
        if not name.startswith("-"):
            return f"{prog} takes {choices}, not {choice[1]!r}.{hint}"
        return f"{name} does not accept {choice[1]!r}.{hint} It takes {choices}."
    if value := re.match(r"ignored explicit argument '?(.*?)'?$", given):
        return (
            _no_such_value(name, value[1], options)
            or f"{name} takes no value, but was given {value[1]!r}.{see}"
        )
    if other := re.match(r"not allowed with argument (.*)", given):
        return f"{name} and {_plain_name(other[1])} cannot be used together.{see}"
    if given == "expected one argument":
        return f"{name} needs a value.{see}"
    given = re.sub(r"invalid (int|float) value: (.*)", r"\2 is not a number", given)
    return f"{name}: {given}.{see}"


def _no_such_value(name: str, given: str, options: Sequence[str]) -> str:
    """Return that an option does not accept a value; empty if it takes none. See add_settings."""
    values = [option.partition("=")[2] for option in options if option.startswith(f"{name}=")]
    hint = did_you_mean(given, values)
    told = f"{name} does not accept {given!r}.{hint} It takes {', '.join(values)}, or no value."
    return told if values else ""


def _similar_options(name: str, options: Sequence[str]) -> str:
    """Return the options that begin like a misspelt one, or look like it, as a question."""
    begin_so = [
        option
        for option in options
        if option.startswith(name) and "=" not in option and "_" not in option
    ]
    if name.startswith("--") and begin_so:
        return f" Did you mean {joined(begin_so, 'or')}?"
    return did_you_mean(name, options)


def _plain_name(names: str) -> str:
    """Return the long one of an option's names: ``"--output"`` for ``"-o/--output"``."""
    return max(names.split("/"), key=lambda option: option.startswith("--"))
