"""Take the Python stack of a collective, each different one once, and those of all threads for the
watchdog.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from commlens.model.frames import FrameKind, frame_kind, kind_prefixes, waits_for_thread
from commlens.tap import backward_caller
from commlens.tap.other_threads import (
    frames_of_thread,
    takes_lock,
    threads_with_frames,
    waits_for_lock,
)

_OWN_THREADS = "commlens-"
MAX_FRAMES = 96
_MAX_NATIVE_FRAMES = 128
_CACHE_LIMIT = 20_000
_this_thread = backward_caller.this_thread
Walked = list[tuple[CodeType, int | None, int]]
"""The frames of a thread, as :func:`frames_of_thread` finds them."""


class StackTable:
    """The stacks seen so far, and their positions in the side table.

    The key of a stack is the id and the instruction offset of each code object. In autograd's own
    threads, the number of the stack that called ``backward()`` comes first. Files and lines are
    looked up once, when a stack is new.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        # by key: the position, the code objects (an id is valid only while its object lives), and
        # the frames
        self._known: dict[tuple[int, ...], tuple[int, list[CodeType], list[list[Any]]]] = {}

    def position(self, frame: FrameType | None) -> int:
        """Return the position of the calling thread's stack. In autograd's own threads, the stack
        that called ``backward()`` is joined to it.

        Args:
            frame: the innermost frame; None in a C++ thread. The position is 0 if there is no
                frame at all.
        """
        walk: FrameType | None = frame
        parts: list[int] = []
        add = parts.append
        while walk is not None:
            add(id(walk.f_code))
            add(walk.f_lasti)
            walk = walk.f_back
        key, caller = tuple(parts), 0
        known = self._known.get(key)
        if known is None and not _this_thread.made_by_python:
            caller = backward_caller.number()
            key = (caller, *key)
            known = self._known.get(key)
        if frame is None and not caller:
            return 0
        if known is not None and known[0] > self._writer.side_floor:  # not overwritten yet
            return known[0]
        return self._write(key, frame, caller, known)

    def native_position(self, frame: FrameType | None = None) -> int:
        """Return the position of the calling thread's stack with its C++ frames. It is written each
        time anew, and ``frame`` is ignored.
        """
        frames = native_frames() + backward_caller.frames(backward_caller.number())
        position: int = self._writer.add_blob({"k": "stack", "f": frames})
        return position

    def _write(
        self,
        key: tuple[int, ...],
        frame: FrameType | None,
        caller: int,
        known: tuple[int, list[CodeType], list[list[Any]]] | None,
    ) -> int:
        if known is None:
            codes, frames = _code_objects(frame), frames_of(frame, caller)
            if len(self._known) >= _CACHE_LIMIT:
                self._known = {}
        else:
            _, codes, frames = known
        position: int = self._writer.add_blob({"k": "stack", "f": frames})
        self._known[key] = (position, codes, frames)
        return position


def _code_objects(frame: FrameType | None) -> list[CodeType]:
    codes: list[CodeType] = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes


def shortened(frames: list[list[Any]]) -> list[list[Any]]:
    """Return at most MAX_FRAMES frames, without the middle: the two ends of a deep recursion say
    more than its inside.
    """
    if len(frames) <= MAX_FRAMES:
        return frames
    half = MAX_FRAMES // 2
    return [*frames[:half], ["...", 0, f"({len(frames) - 2 * half} frames)"], *frames[-half:]]


def frames_of(frame: FrameType | None, caller: int = 0) -> list[list[Any]]:
    """Return ``[[file, line, function], ...]``, innermost first.

    Args:
        frame: the innermost frame; None in a C++ thread.
        caller: the number of the stack that called ``backward()``, to be joined; 0: none.
    """
    frames: list[list[Any]] = []
    while frame is not None:
        frames.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
        frame = frame.f_back
    return shortened(frames + backward_caller.frames(caller))


def all_threads(issuing: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the stacks of the program's threads, the main thread first, and a hash that changes
    when the main thread moves. The calling thread and those of commlens are left out.

    If the main thread runs only library code, as in Ray's workers, or waits for another thread, the
    hash also covers the stack of the thread that issues collectives.

    Args:
        issuing: native id of the thread that issued the last collective; 0: none did.
    """
    threads: list[dict[str, Any]] = []
    main_hash = issuing_hash = 0
    main_runs_user_code = True
    for thread, ident, walked in _threads_of_the_program():
        is_main = thread is threading.main_thread()
        name, native_id = f"thread {ident}", 0
        if thread is not None:
            name, native_id = thread.name, thread.native_id or 0
        if is_main:
            main_hash = _hash(walked)
            main_runs_user_code = _runs_user_code(walked)
        elif native_id == issuing and native_id:
            issuing_hash = _hash(walked)
        threads.append(
            {
                # after a fork, Python 3.11 keeps the parent's native id for the main thread
                "tid": os.getpid() if is_main else native_id,
                "name": name,
                "main": is_main,
                "f": shortened(backward_caller.described(walked)),
                "in_lock": takes_lock(*walked[0]),
            }
        )
    threads.sort(key=lambda entry: not entry["main"])
    if [entry["main"] for entry in threads] == [True] and _is_locked_out():
        threads[0]["locked_out"] = True
    if not main_runs_user_code:
        main_hash = hash((main_hash, issuing_hash))
    return threads, main_hash


def _runs_user_code(walked: Walked) -> bool:
    """Return whether the main thread runs the user's code, and does not wait for another thread."""
    innermost = [(code.co_filename, code.co_name) for code, _, _ in walked[:3]]
    return not waits_for_thread(innermost) and any(
        _is_user_code(code.co_filename) for code, _, _ in walked
    )


def _threads_of_the_program() -> Iterator[tuple[threading.Thread | None, int, Walked]]:
    """Yield the program's other threads (None if unknown to Python), identifiers and frames."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    for ident in threads_with_frames():
        thread = known.get(ident)
        is_ours = thread is not None and thread.name.startswith(_OWN_THREADS)
        is_left_out = is_ours or ident == threading.get_ident()
        if not is_left_out and (walked := frames_of_thread(ident)):  # empty: the thread has ended
            yield thread, ident, walked


def _is_locked_out() -> bool:
    """Return whether the main thread waits for a lock that no signal handler can release. It must
    be the only thread that runs Python, so that no other thread can release the lock.
    """
    not_the_programs = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
    handlers = map(signal.getsignal, signal.valid_signals())
    return all(handler in not_the_programs for handler in handlers) and waits_for_lock(
        threading.main_thread().ident or 0
    )


def _hash(walked: Walked) -> int:
    return hash(tuple((id(code), offset) for code, _, offset in walked))


@functools.lru_cache(maxsize=1024)
def _is_user_code(file: str) -> bool:
    return frame_kind(file, kind_prefixes({})) is FrameKind.USER


def native_frames() -> list[list[Any]]:
    """Return the C++ and Python frames of the calling thread, innermost first. This is slow:
    torch's own unwinder finds them.
    """
    from torch._C._profiler import gather_traceback, symbolize_tracebacks

    (frames,) = symbolize_tracebacks([gather_traceback(True, False, True)])
    result: list[list[Any]] = []
    for frame in frames[:_MAX_NATIVE_FRAMES]:
        file, line, name = (
            str(frame.get("filename", "")),
            int(frame.get("line", 0)),
            str(frame.get("name", "??")),
        )
        result.append([file, line, name] if file.endswith(".py") else [file, line, name, "n"])
    return result
