"""The command line: one file per verb, and the list of them.

A verb's module is imported only when it is called, so that ``commlens --help`` starts at once. A command is a class with
``name``, ``add_arguments(parser)`` and ``run(arguments) -> exit status``; the docstring of the class is its help.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from commlens.errors import CommandError, CommlensError


class Command(Protocol):
    """What a verb's class has."""

    name: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it, and return the process's exit status."""


class Entry(NamedTuple):
    """A line of the list: enough for ``commlens --help`` without importing the verb's module."""

    name: str  # of the verb, and of its module; the class is called like it: LaunchCommand in launch.py
    help: str  # the first line of the class's docstring; a test holds the two together
    runs_user_code: bool = False  # then what the user's program raises is its own affair

    def load(self) -> Command:
        """Import the module and make the command."""
        module = importlib.import_module(f"commlens.commands.{self.module}")
        command: Command = getattr(module, self.class_name)()
        return command

    @property
    def module(self) -> str:
        """Name of the module in this package."""
        return self.name.replace("-", "_")

    @property
    def class_name(self) -> str:
        """Name of the class in it."""
        return "".join(part.capitalize() for part in self.name.split("-")) + "Command"


COMMANDS: tuple[Entry, ...] = (
    Entry("demo", "Run a real multi-process job with one fault in it, and diagnose it."),
    Entry("launch", "Run a script under torchrun with a black box in every worker."),
    Entry("run", "Run a script as one worker with a black box, under any other launcher.", runs_user_code=True),
    Entry("trace", "Run a script and trace which collectives it issues, when, why, and how many bytes.", runs_user_code=True),
    Entry("preview", "Trace any rank of any number of ranks in one process, without GPUs or a network.", runs_user_code=True),
    Entry("diagnose", "Say from dumps or black boxes what is wrong, and which rank did it."),
    Entry("status", "Show what every rank on this node is doing right now."),
    Entry("dump", "Write a dump of a job on this node: running, stuck or dead."),
    Entry("view", "Show what a trace holds: which collectives, where, why, and how many bytes."),
    Entry("compare", "Say what changed from one trace to another, or moved between two dumps of a job."),
    Entry("convert", "Write dumps of any origin for other tools."),
    Entry("config", "Ask a few questions and write the settings file; config show prints what is in force."),
    Entry("build-native", "Compile the native engine for this torch and Python: recording then costs less."),
    Entry("doctor", "Say what is here, which engine records, and what would not work."),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The ``commlens`` command.

    Returns:
        The exit status: 2 for wrong usage, else what the verb says.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except CommlensError as error:
        print(f"commlens: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except BrokenPipeError:
        if _runs_user_code(arguments):
            raise
        # Whoever read us (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        if _runs_user_code(arguments):
            raise
        return 130


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
    parser = argparse.ArgumentParser(
        prog=f"commlens {verb}",
        description=_documentation(type(command)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(rest))


def _documentation(kind: type[Command]) -> str:
    """The docstring without its indentation: what inspect.getdoc gives, without the time that importing inspect takes."""
    first, _, rest = (kind.__doc__ or "").partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


def _entry(verb: str) -> Entry:
    names = [entry.name for entry in COMMANDS]
    if verb in names:
        return COMMANDS[names.index(verb)]
    import difflib

    close = difflib.get_close_matches(verb, names, n=1)
    what = "has no option" if verb.startswith("-") else "has no command"
    suggestion = f"Did you mean {close[0]}?" if close else f"The commands are {', '.join(names)}."
    raise CommandError(f"commlens {what} {verb!r}. {suggestion}")


def _runs_user_code(arguments: list[str]) -> bool:
    return any(entry.runs_user_code and entry.name == arguments[0] for entry in COMMANDS if arguments)


def help_text() -> str:
    """What ``commlens --help`` prints."""
    lines = [
        "usage: commlens COMMAND [options]",
        "",
        "Which rank, which collective, which line stopped a distributed PyTorch job.",
        "",
        "commands:",
        *(f"  {entry.name:<13}{entry.help}" for entry in COMMANDS),
        "",
        "options:",
        "  -h, --help     show this, or after a command that command's help",
        "  -V, --version  show the version",
        "",
        "Start with:  commlens demo",
    ]
    return "\n".join(lines)
