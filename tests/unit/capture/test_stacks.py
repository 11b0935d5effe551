"""The stacks of all threads, and of exceptions."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import pytest

from commlens.capture.stacks import all_threads
from commlens.capture.uncaught import hide_our_frames
from conftest import SOURCE


def test_every_other_thread_innermost_frame_first_and_the_main_thread_first() -> None:
    seen: list[tuple[list[dict[str, object]], int]] = []

    def outer() -> None:
        seen.append(all_threads())

    waiting, over = threading.Event(), threading.Event()

    def idle() -> None:
        waiting.set()
        over.wait(30)

    names = ("idler", "looker", "commlens-link")
    idler, looker, own = (
        threading.Thread(target=target, name=name)
        for target, name in zip((idle, outer, idle), names, strict=True)
    )
    own.start()
    idler.start()
    assert waiting.wait(30)
    looker.start()
    looker.join(30)
    over.set()
    idler.join(30)
    own.join(30)
    threads, main_hash = seen[0]
    assert [thread["name"] for thread in threads if thread["name"] in ("MainThread", *names)] == [
        "MainThread",
        "idler",
    ]
    assert (
        threads[0]["main"]
        and threads[0]["tid"] == threading.main_thread().native_id
        and main_hash != 0
    )
    functions = [function for _, _, function in threads[0]["f"]]  # type: ignore[attr-defined]
    assert "test_every_other_thread_innermost_frame_first_and_the_main_thread_first" in functions
    idle_file, idle_line, _ = next(
        frame
        for thread in threads
        if thread["name"] == "idler"
        for frame in thread["f"]
        if frame[2] == "idle"
    )  # type: ignore[attr-defined]
    assert idle_file == __file__ and idle_line == idle.__code__.co_firstlineno + 2


def test_frames_of_commlens_are_left_out_of_tracebacks():
    """An exception that passes through commlens, raised from another that does."""
    through = (
        "def through(call):\n    try:\n        call()\n    except ValueError as error:\n       "
        " raise KeyError from error"
    )
    ours = compile(through, f"{SOURCE}/commlens/tap/x.py", "exec")
    names: dict[str, Any] = {}
    exec(ours, names)

    def users():
        raise ValueError

    try:
        names["through"](users)
    except KeyError as error:
        hide_our_frames(error)
        functions = [
            [frame.name for frame in traceback.extract_tb(each.__traceback__)]
            for each in (error, error.__cause__)
        ]
    assert functions == [["test_frames_of_commlens_are_left_out_of_tracebacks"], ["users"]]


def test_an_exception_whose_frames_are_all_of_commlens():
    """As the cause of an exception is, if a backend raises it inside a call of ours."""
    names: dict[str, Any] = {}
    exec(
        compile(
            "try:\n    raise ValueError\nexcept ValueError as e:\n    error = e",
            f"{SOURCE}/commlens/tap/x.py",
            "exec",
        ),
        names,
    )
    names["error"].__traceback__ = (
        names["error"].__traceback__.tb_next or names["error"].__traceback__
    )
    hide_our_frames(names["error"])


@pytest.mark.launches
def test_the_main_thread_of_a_forked_process_has_its_own_id() -> None:
    program = """
import os, sys, threading
from commlens.capture import stacks
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
found = []
thread = threading.Thread(target=lambda: found.extend(stacks.all_threads(0)[0]))
thread.start()
thread.join()
os._exit([entry["tid"] for entry in found if entry["main"]] != [os.getpid()])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("before", "is_locked_out"),
    [
        ("", True),
        ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", True),
        ("signal.signal(signal.SIGUSR1, lambda *_: lock.release())", False),
        ("threading.Timer(60, lock.release).start()", False),
    ],
)
def test_a_lock_that_nothing_can_release(before: str, is_locked_out: bool) -> None:
    program = f"""
import os, signal, threading, time
from commlens.capture import stacks
lock = threading.Lock()
def look():
    told, end = None, time.monotonic() + 1.0
    while not told and time.monotonic() < end:
        time.sleep(0.02)
        told = stacks.all_threads(0)[0][0].get("locked_out", False)
    os._exit(told is not {is_locked_out})
threading.Thread(target=look, name="commlens-test").start()
lock.acquire()
{before}
with lock:
    pass
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("take", "in_lock"),
    [
        ("lock.acquire()", True),
        ("with lock: pass", True),
        ("time.sleep(60)", False),
        ("threading.Event().wait()", False),
        ("queue.Queue().get()", False),
    ],
)
def test_another_thread_that_waits_for_a_lock(take: str, in_lock: bool) -> None:
    lock = threading.Lock()
    names = {"lock": lock, "time": time, "threading": threading, "queue": queue}
    other = threading.Thread(
        target=exec, args=(f"def take():\n    {take}\ntake()", names), daemon=True
    )
    with lock:
        other.start()
        told, end = None, time.monotonic() + 1.0
        while not told and time.monotonic() < end:
            time.sleep(0.02)
            [told] = [
                each.get("in_lock", False)
                for each in all_threads()[0]
                if each["tid"] == other.native_id
            ]
    assert told is in_lock
