"""The worker side of ``commlens trace``: run the user's program in this interpreter under a
tracer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from commlens.config import is_switched_on
from commlens.errors import require_torch
from commlens.launch import worker

if TYPE_CHECKING:
    from commlens.traces.trace import Trace


def run(
    program: Sequence[str],
    *,
    module: bool,
    directory: str,
    steps: str | None,
    depth: str,
    summary: bool,
) -> NoReturn:
    """Run a program and save its trace.

    Args:
        program: the script's path (or the module's name) and its arguments.
        module: run as ``python -m``.
        directory: where to save the trace.
        steps: optimizer steps to trace.
        depth: ``collectives`` or ``ops``.
        summary: print a short summary on standard error, on the first rank.

    Raises:
        CommandError: the program cannot be read, or ``steps`` is not a range of steps.
        MissingDependency: torch is not installed.
    """
    require_torch("commlens trace")
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
        # rank 0, or a process without a group
        if trace is not None and summary and not traced.rank:
            _print_summary(trace, str(traced.saved), traced.rank)


def _print_summary(trace: Trace, path: str, rank: int | None) -> None:
    from commlens.reports.trace_short import short_summary

    try:
        if rank is not None:
            folder = os.path.relpath(os.path.dirname(path))  # noqa: PTH120 - for showing
            more = (
                f"One file per rank in {folder}; commlens view {os.path.relpath(path)} shows this"
                " one."
            )
        else:
            more = f"commlens view {os.path.relpath(path)} shows the whole trace."
        sys.stdout.flush()
        print(f"{short_summary(trace.to_summary())}\ncommlens: {more}", file=sys.stderr)
    except Exception as error:
        print(
            f"commlens: the trace is in {path}, but it could not be summarised:"
            f" {type(error).__name__}: {error}",
            file=sys.stderr,
        )
