"""One worker: start the user's program with commlens switched on, and otherwise as Python would."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from commlens.capture.uncaught import hide_our_frames
from commlens.errors import CommandError, CommlensError, MissingDependency, require_torch
from commlens.launch import autoload

_STARTER = re.compile(
    "|".join(
        map(re.escape, (str(Path(__file__).parents[1]) + os.sep, runpy.__file__, "<frozen runpy>"))
    )
    + r"|(.*/)?commlens$"
)
"""Files of the frames that lead to the program; the last one is the installed command."""


def interpreter_flags() -> list[str]:
    """Return the flags of this Python (``-u``, ``-X dev``, ``-W error`` ...), to start another one
    with them.
    """
    given = len(sys.argv) - 1
    head = sys.orig_argv[1 : len(sys.orig_argv) - given] if given else sys.orig_argv[1:]
    if len(head) >= 2 and head[-2] == "-m":  # python -u -m commlens ...
        return head[:-2]
    if head and not head[-1].startswith("-"):  # python -u /venv/bin/commlens ...
        return head[:-1]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def run(program: Sequence[str], *, module: bool, environment: Mapping[str, str]) -> NoReturn:
    """Become the user's program.

    If torch's entry point works, ``python program...`` replaces this process, and only the
    environment variables are ours. Otherwise commlens is switched on here, and the program runs in
    this interpreter.

    Args:
        program: the script's path (or the module's name) and its arguments.
        module: run it as ``python -m``.
        environment: the variables to add.
    """
    require_torch("commlens run")
    os.environ.update(environment)
    os.environ["COMMLENS"] = "1"
    reason = autoload.obstacle()
    if reason is None:
        sys.stdout.flush()
        sys.stderr.flush()
        command = [sys.executable, *interpreter_flags(), *(["-m"] if module else []), *program]
        os.execv(sys.executable, command)
    _switch_on(reason)
    run_here(program, module=module)


def check_program(program: Sequence[str], *, module: bool, command: bool = False) -> None:
    """Refuse a script or a command that does not exist, before anything starts.

    Args:
        program: the script's path and its arguments.
        module: it is a module's name; that is not checked.
        command: it is a command, which may be found in ``PATH``.

    Raises:
        CommandError: it does not exist.
    """
    if command and shutil.which(program[0]) is None:
        raise CommandError(
            f"The command {program[0]} cannot be run: there is no such executable file."
        )
    if not module and not command and not Path(program[0]).exists():
        raise CommandError(f"The program {program[0]} cannot be read: there is no such file.")


def record_here() -> None:
    """Switch recording on in this interpreter if torch's entry point does not."""
    reason = autoload.obstacle()
    if reason is not None:
        _switch_on(reason)


def run_here(program: Sequence[str], *, module: bool) -> NoReturn:
    """Run a program in this interpreter as ``python program...`` does, and exit as it does.

    Args:
        program: the script's path (or the module's name) and its arguments.
        module: run it as ``python -m``.
    """
    try:
        execute(program, module=module)
    except CommlensError:
        raise
    except Exception as error:
        # The traceback begins in the user's program, as without commlens.
        show_from_program(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    except KeyboardInterrupt as error:
        show_from_program_at_exit(error)
        raise
    sys.exit(0)


def execute(program: Sequence[str], *, module: bool) -> None:
    """Run a program as ``__main__`` in this interpreter. Its exceptions pass through."""
    sys.argv = list(program)
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        _run_script(program)


def show_from_program(error: BaseException) -> None:
    """Begin the traceback of an exception in the program, and leave out the frames of commlens."""
    trace = error.__traceback__
    while trace is not None and _STARTER.match(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
    hide_our_frames(error)


def show_from_program_at_exit(error: BaseException) -> None:
    """Do the same for an exception that is about to end this interpreter, when it prints it."""
    show = sys.excepthook

    def excepthook(kind: Any, value: Any, trace: Any) -> None:
        if value is error:
            show_from_program(error)
            trace = error.__traceback__
        show(kind, value, trace)

    sys.excepthook = excepthook


def _switch_on(reason: str) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency.torch("commlens run", error) from None
    try:
        from commlens.launch.recording import enable

        enable()
    except Exception as error:  # the job goes on without commlens
        print(
            f"commlens: recording could not be switched on: {error} (and not by torch either:"
            f" {reason})",
            file=sys.stderr,
        )


def _run_script(program: Sequence[str]) -> None:
    """Do what ``python script.py args`` does, in this interpreter.

    The module stays in ``sys.modules["__main__"]``: spawned children, pickle and exit handlers look
    it up there.
    """
    path = Path(program[0])
    if path.is_dir() or path.suffix in (".zip", ".pyz"):
        sys.path[0] = str(path)
        runpy.run_path(str(path), run_name="__main__")
        return
    try:
        source = path.read_bytes()
    except OSError as error:
        raise CommandError(f"The program {program[0]} cannot be read: {error.strerror}.") from None
    file = str(path.absolute())
    sys.path[0] = str(path.resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    namespace: dict[str, Any] = main.__dict__
    namespace.update(__builtins__=builtins, __cached__=None)
    if sys.version_info < (3, 14):  # from then on it would hide the module's own annotations
        namespace["__annotations__"] = {}
    sys.modules["__main__"] = main
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
