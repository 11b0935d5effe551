"""Read the Python stacks of other threads while they run."""

from __future__ import annotations

import gc
import itertools
import operator
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any, TypeVar

_T = TypeVar("_T")

# A thread that holds another thread's frame when that frame returns takes over its locals, and
# drops them in the wrong thread and too late: a guard that torch keeps in a local then never
# restores its setting (on torch 2.6 that broke compilations). So we must drop another thread's
# frames before the GIL is released, which may happen between any two bytecodes. Each of the two
# functions below therefore walks the frames in a single C call, and keeps only code objects and
# line numbers. Up to Python 3.11, the garbage collector may start within such a call and run
# finalizers, which are bytecode: so it is switched off and on again in the same call.


def _in_one_call(items: Iterable[_T]) -> list[_T]:
    """Return all items, made in a single C call during which no bytecode runs.

    Args:
        items: iterators of C functions, lazily evaluated.
    """
    was_enabled: list[bool] = []
    before = itertools.chain(
        map(was_enabled.append, itertools.starmap(gc.isenabled, [()])),
        itertools.starmap(gc.disable, [()]),
    )
    after = itertools.starmap(gc.enable, itertools.compress([()], was_enabled))
    try:
        made: list[Any] = list(itertools.chain(before, items, after))
    except BaseException:
        if was_enabled and was_enabled[0]:
            gc.enable()
        raise
    return made[2 : len(made) - was_enabled[0]]


def threads_with_frames() -> list[int]:
    """Return the identifiers of all threads that run Python code."""
    return _in_one_call(itertools.chain.from_iterable(itertools.starmap(sys._current_frames, [()])))


def frames_of_thread(ident: int) -> list[tuple[CodeType, int | None, int]]:
    """Return ``(code, line, instruction offset)`` for each frame of a thread, innermost first;
    empty if the thread has ended.
    """
    innermost = map(
        operator.methodcaller("get", ident), itertools.starmap(sys._current_frames, [()])
    )
    frame_by_frame = itertools.accumulate(
        itertools.chain(innermost, itertools.repeat("f_back")), getattr
    )
    return _in_one_call(
        map(
            operator.attrgetter("f_code", "f_lineno", "f_lasti"),
            iter(frame_by_frame.__next__, None),
        )
    )
