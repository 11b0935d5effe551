"""Read the Python stacks of other threads while they run."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import itertools
import operator
import sys
import threading
from collections.abc import Iterable
from types import CodeType
from typing import Any, TypeVar

_T = TypeVar("_T")
_LOCK = type(threading.Lock())
_NO_PART = frozenset({"CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "COPY", "SWAP"})
_ENTERS = ["LOAD_SPECIAL", "LOAD_SPECIAL"]  # from Python 3.14: of __exit__ and of __enter__

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


def waits_for_lock(ident: int) -> bool:
    """Return whether a thread waits, without a timeout, for a ``threading.Lock`` that is locked."""
    place = frames_of_thread(ident)[:1]
    names = _lock_at(place[0][0], place[0][2]) if place else ()
    if not names:
        return False
    innermost = map(
        operator.methodcaller("get", ident), itertools.starmap(sys._current_frames, [()])
    )
    scopes = map(operator.attrgetter("f_locals", "f_globals"), filter(None, innermost))
    # copies: from Python 3.13 on, the locals hold the frame
    copies = _in_one_call(map(dict, itertools.chain.from_iterable(scopes)))
    value: Any = next((scope[names[0]] for scope in copies if names[0] in scope), None)
    for name in names[1:]:
        value = inspect.getattr_static(value, name, None)
    return type(value) is _LOCK and value.locked() and frames_of_thread(ident)[:1] == place


def takes_lock(code: CodeType, _: int | None, offset: int) -> bool:
    """Return whether a thread's innermost instruction takes a lock without a timeout, and so
    whether it probably waits for one. Waits for an event, queue or thread also take a lock, within
    ``threading.py``; these are none. No variables are looked at: up to Python 3.12, reading those
    of another thread's frame keeps them all alive until the frame ends.
    """
    return bool(_lock_at(code, offset)) and code.co_filename != threading.__file__


@functools.lru_cache(maxsize=64)
def _lock_at(code: CodeType, offset: int) -> tuple[str, ...]:
    """Return the names ``("self", "lock")`` if the instruction takes ``self.lock``; else none."""
    before = [one for one in dis.get_instructions(code) if one.offset <= offset]
    if not before or before[-1].offset != offset:
        return ()
    at = before[-1]
    parts = [one for one in before[:-1] if one.opname not in _NO_PART]
    if at.opname in ("CALL", "PRECALL", "CALL_METHOD") and not at.arg:
        if [one.opname for one in parts[-2:]] == _ENTERS:
            del parts[-2:]
        elif not parts or parts.pop().argval != "acquire":
            return ()
    elif at.opname not in ("BEFORE_WITH", "SETUP_WITH"):
        return ()
    return _names_loaded(parts)


def _names_loaded(parts: list[dis.Instruction]) -> tuple[str, ...]:
    """Return the names ``("self", "lock")`` if the last instructions load ``self.lock``; else
    none.
    """
    names: list[str] = []
    while parts and parts[-1].opname == "LOAD_ATTR":
        names.append(parts.pop().argval)
    if not parts or "LOAD_" not in parts[-1].opname:
        return ()
    loaded = parts[-1].argval
    names.append(loaded[-1] if isinstance(loaded, tuple) else loaded)
    return tuple(reversed(names)) if all(isinstance(name, str) for name in names) else ()
