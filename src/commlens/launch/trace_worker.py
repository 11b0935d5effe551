"""The worker half of ``commlens trace``: the user's program in this interpreter, with a tracer beside it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from commlens.config import is_switched_on
from commlens.errors import MissingDependency
from commlens.launch import worker

if TYPE_CHECKING:
    from commlens.traces.trace import Trace


def run(program: Sequence[str], *, module: bool, directory: str, steps: str | None, depth: str, summary: bool) -> NoReturn:
    """Run a program and save its trace.

    Args:
        program: the script's path (or the module's name) and its arguments.
        module: run as ``python -m``.
        directory: where the trace goes.
        steps: optimizer steps to trace.
        depth: how much is traced.
        summary: whether the first rank says in a few lines what it saw, on standard error.

    Raises:
        CommandError: the program cannot be read, or ``steps`` is no range of steps.
        MissingDependency: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency.torch("commlens trace")
    worker.check_program(program, module=module)
    if is_switched_on(os.environ):
        worker.record_here()
    from commlens.tracing.script import TracedProcess

    traced = TracedProcess(directory, steps=steps, depth=depth, script=" ".join(program))
    traced.start()
    try:
        worker.run_here(program, module=module)
    finally:
        trace = traced.finish()
        if trace is not None and summary and traced.is_first_rank:
            _say(trace, str(traced.saved), traced.rank)


def _say(trace: Trace, path: str, rank: int | None) -> None:
    from commlens.reports.trace_short import short_summary

    try:
        if rank is not None:
            folder = os.path.relpath(os.path.dirname(path))  # noqa: PTH120 - for showing
            more = f"One file for each rank in {folder}; commlens view {os.path.relpath(path)} shows this one."
        else:
            more = f"commlens view {os.path.relpath(path)} shows all of it."
        sys.stdout.flush()
        print(f"{short_summary(trace.to_summary())}\ncommlens: {more}", file=sys.stderr)
    except Exception as error:
        print(f"commlens: the trace is in {path}; it could not be summed up: {type(error).__name__}: {error}", file=sys.stderr)
