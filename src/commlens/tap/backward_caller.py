"""Find the stack that called ``backward()``, for collectives that autograd issues in threads of its
own.

On an accelerator, autograd runs the backward pass in threads made by C++. Their stacks show only
torch's hooks (FSDP2), or no Python at all (DDP's reducer). The thread that called ``backward()``
stands in ``_engine_run_backward`` meanwhile, and its stack has the user's line.

Each stack that called ``backward()`` has a number, which can be part of the key of a joined stack.
"""

from __future__ import annotations

import itertools
import threading
from types import CodeType
from typing import Any, Final, NamedTuple

import torch

from commlens.tap.other_threads import frames_of_thread, threads_with_frames

_RUNS_BACKWARD: Final = "_engine_run_backward"
_LIMIT: Final = 1000
_NO_RUN: Final = -1


class _Caller(NamedTuple):
    number: int
    frames: list[list[Any]]
    codes: list[CodeType]  # the key has their ids, which are valid only while they live


class _ThisThread(threading.local):
    def __init__(self) -> None:
        own = threading.get_ident()
        self.made_by_python = any(
            thread.ident == own and not isinstance(thread, threading._DummyThread)
            for thread in threading.enumerate()
        )
        self.run = _NO_RUN
        self.caller = 0


this_thread = _ThisThread()
"""``this_thread.made_by_python`` is False in autograd's own threads, among others."""

_callers: dict[tuple[int, ...], _Caller] = {}
_frames: dict[int, list[list[Any]]] = {}  # by number
_numbers = itertools.count(1)


def number() -> int:
    """Return the number of the stack that called the backward pass which the calling thread runs
    for another thread; 0 if there is none, or if it is not known.
    """
    thread = this_thread
    if thread.made_by_python:
        return 0
    run = torch._C._current_graph_task_id()
    if run != thread.run:
        # The caller's stack does not change as long as it waits for this run.
        thread.caller = _find() if run != _NO_RUN else 0
        thread.run = run
    return thread.caller


def frames(number: int) -> list[list[Any]]:
    """Return a stack that called ``backward()``, by its number: ``[[file, line, function], ...]``,
    innermost first; empty for 0.
    """
    return _frames.get(number, []) if number else []


def described(walked: list[tuple[CodeType, int | None, int]]) -> list[list[Any]]:
    """Return the frames that :func:`frames_of_thread` found, like :func:`frames`."""
    return [[code.co_filename, line or 0, code.co_name] for code, line, _ in walked]


def _find() -> int:
    """Return the number of the stack of the one other thread that is in a backward pass; 0 if
    several are, since it is unknown which of them waits for the calling thread.
    """
    own = threading.get_ident()
    found = []
    for ident in threads_with_frames():
        walked = frames_of_thread(ident) if ident != own else []
        names = [code.co_name for code, _, _ in walked]
        if _RUNS_BACKWARD in names:
            found.append(walked[names.index(_RUNS_BACKWARD) :])
    if len(found) != 1:
        return 0
    (walked,) = found
    key = tuple(itertools.chain.from_iterable((id(code), offset) for code, _, offset in walked))
    known = _callers.get(key)
    if known is None:
        known = _keep(key, walked)
    return known.number


def _keep(key: tuple[int, ...], walked: list[tuple[CodeType, int | None, int]]) -> _Caller:
    if len(_callers) >= _LIMIT:
        _callers.clear()
        _frames.clear()
    caller = _Caller(
        next(_numbers),
        described(walked),
        [code for code, _, _ in walked],
    )
    _frames[caller.number] = caller.frames
    return _callers.setdefault(key, caller)
