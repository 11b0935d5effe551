"""The command line: one file per verb, and the list of verbs.

A verb's module is imported only when the verb is used, so that ``commlens --help`` starts at once.
A command is a class with ``add_arguments(parser)`` and ``run(arguments) -> exit status``; the
docstring of the class is its help.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn, Protocol

from commlens.errors import CommandError, CommlensError, did_you_mean


class Command(Protocol):
    """The interface of a verb's class."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command, and return the process's exit status."""


class Entry(NamedTuple):
    """A verb in the list: enough for ``commlens --help`` without importing the verb's module."""

    name: str  # of the verb and its module; the class is named after it: LaunchCommand in launch.py
    help: str  # the first line of the class's docstring; a test compares the two
    runs_user_code: bool = False  # exceptions of the user's program are then passed on

    def load(self) -> Command:
        """Import the module and create the command."""
        module = importlib.import_module(f"commlens.commands.{self.module}")
        command: Command = getattr(module, self.class_name)()
        return command

    @property
    def module(self) -> str:
        """The name of the module in this package."""
        return self.name.replace("-", "_")

    @property
    def class_name(self) -> str:
        """The name of the class in that module."""
        return "".join(part.capitalize() for part in self.name.split("-")) + "Command"


SUMMARY = "Find the rank, the collective and the line that stopped a distributed PyTorch job."

PURPOSES: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    (
        "Try it",
        (Entry("demo", "Run a real multi-process job with one fault in it, and diagnose it."),),
    ),
    (
        "Before a job starts",
        (
            Entry(
                "check",
                "Find the mismatches and deadlocks of a script before it runs, on one CPU.",
            ),
        ),
    ),
    (
        "Run a job with recording on",
        (
            Entry("launch", "Run a script under torchrun with a black box in every worker."),
            Entry(
                "run",
                "Run a script as one worker with a black box, under any other launcher.",
                runs_user_code=True,
            ),
        ),
    ),
    (
        "Look at a job that runs or hangs now",
        (
            Entry(
                "status",
                "Show what every rank of a job is doing right now: one line if nothing is wrong,"
                " otherwise a table.",
            ),
            Entry(
                "top",
                "Show live what every rank of a job is doing: sort, fold, pick a rank and see its"
                " stack.",
            ),
            Entry(
                "attach",
                "Look at a job that was started without commlens: say whether it is stuck, on which"
                " rank and line.",
            ),
            Entry(
                "stacks",
                "Show the stacks of all ranks of a job, merged into a few classes, the odd ones"
                " first.",
            ),
            Entry("dump", "Save a dump of a running, stuck or dead job on this node."),
        ),
    ),
    (
        "Find the fault in dumps",
        (
            Entry(
                "diagnose",
                "Diagnose dumps or black boxes: name the fault, the rank, the collective and the"
                " line.",
            ),
            Entry("convert", "Convert dumps to Flight Recorder files, Perfetto, Parquet or CSV."),
        ),
    ),
    (
        "See what a model communicates",
        (
            Entry(
                "trace",
                "Run a script and trace its collectives: when, why, and how many bytes.",
                runs_user_code=True,
            ),
            Entry(
                "preview",
                "Trace one rank of a job of any size, in one process, without GPUs or a network.",
                runs_user_code=True,
            ),
            Entry(
                "view",
                "Show a trace: which collectives a rank issued, where, why, and how many bytes.",
            ),
            Entry(
                "compare", "Report what changed between two traces, or between two dumps of a job."
            ),
        ),
    ),
    (
        "Set up",
        (
            Entry(
                "config",
                "Write the settings file by asking questions; config show prints the settings in"
                " use.",
            ),
            Entry(
                "build-native",
                "Build the native engine for this torch and Python, which makes recording cheaper.",
            ),
            Entry(
                "doctor",
                "Check this environment: versions, the recording engine, and what would not work.",
            ),
            Entry(
                "completion",
                "Print a script that makes a shell complete commlens's commands and options.",
            ),
        ),
    ),
)
"""Every command, grouped by what it is for, as ``commlens --help`` shows them."""

COMMANDS: tuple[Entry, ...] = tuple(entry for _, entries in PURPOSES for entry in entries)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``commlens`` command.

    Returns:
        The exit status: 2 for wrong usage, 130 after Ctrl-C, 141 if the reader of a pipe has left,
        otherwise the command's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except CommlensError as error:
        print(f"commlens: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except (BrokenPipeError, KeyboardInterrupt) as error:
        if any(entry.runs_user_code and entry.name in arguments[:1] for entry in COMMANDS):
            raise
        if isinstance(error, KeyboardInterrupt):
            return 130
        # The reader (`| head`) has closed the pipe. Without this, Python would complain again when
        # it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from commlens.launch.options import usage_error

        raise usage_error(self, message)


class Paragraphs(argparse.HelpFormatter):
    """Wraps each paragraph of a description to the terminal's width."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            super(Paragraphs, self)._fill_text(part, width, indent) for part in text.split("\n\n")
        )


def add_program(parser: argparse.ArgumentParser) -> None:
    """Declare the program to run and its own arguments, which are passed on unchanged."""
    from commlens.launch.options import own_options

    parser.set_defaults(own_options=own_options(parser))  # for program_of()
    parser.add_argument(
        "-m", "--module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="the script (or module) and its arguments"
    )


def program_of(arguments: argparse.Namespace, example: str) -> list[str]:
    """Return the program and its arguments.

    Raises:
        CommandError: there is none; the message ends with the example.
    """
    from commlens.launch.options import program_from

    program = program_from(arguments.program, arguments.own_options, module=arguments.module)
    if not program:
        raise CommandError(f"Which program? For example: commlens {example}")
    return program


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(help_text(), file=sys.stderr)
        return 2
    verb, *rest = arguments
    if verb in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if verb in ("-V", "--version"):
        from commlens.version import __version__

        print(f"commlens {__version__}")
        return 0
    command = _entry(verb).load()
    parser = _Parser(
        prog=f"commlens {verb}",
        description=documentation(command),
        formatter_class=Paragraphs,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(rest))


def documentation(command: Command) -> str:
    """Return the docstring without its indentation, like inspect.getdoc, which takes too long to
    import.
    """
    first, _, rest = (type(command).__doc__ or "").partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


def _entry(verb: str) -> Entry:
    names = [entry.name for entry in COMMANDS]
    if verb in names:
        return COMMANDS[names.index(verb)]
    if os.path.exists(verb):  # noqa: PTH110 - pathlib takes long to import
        name = shlex.quote(verb)
        do = (
            f"`commlens launch {name}` runs it"
            if verb.endswith(".py")
            else f"`commlens diagnose {name}` diagnoses a dump"
        )
        raise CommandError(f"commlens needs a command before {verb!r}: {do}.")
    what = "has no option" if verb.startswith("-") else "has no command"
    raise CommandError(
        f"commlens {what} {verb!r}."
        + (did_you_mean(verb, names) or f" The commands are {', '.join(names)}.")
    )


def help_text() -> str:
    """Return the text of ``commlens --help``."""
    width = max(40, shutil.get_terminal_size().columns - 2)

    def rows(named: Iterable[tuple[str, str]], column: int) -> list[str]:
        return [
            textwrap.fill(f"  {name:<{column}}{text}", width, subsequent_indent=" " * (column + 2))
            for name, text in named
        ]

    lines = [
        "usage: commlens COMMAND [options]",
        "",
        textwrap.fill(SUMMARY, width),
        "",
    ]
    for purpose, entries in PURPOSES:
        lines += [f"{purpose}:", *rows([(entry.name, entry.help) for entry in entries], 13), ""]
    lines += [
        "options:",
        *rows(
            [
                ("-h, --help", "show this help; after a command, its help"),
                ("-V, --version", "show the version"),
            ],
            15,
        ),
        "",
        "Start with:  commlens demo",
    ]
    return "\n".join(lines)
