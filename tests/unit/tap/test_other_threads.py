"""Looking at other threads' stacks, which go on meanwhile."""

from __future__ import annotations

import gc
import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from commlens.tap.other_threads import frames_of_thread, threads_with_frames, waits_for_lock


class Guard:
    """A local that has to end with its function, in the function's thread, like those with which
    torch sets what a thread does.
    """

    ended_elsewhere = 0

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() != self.thread:
            Guard.ended_elsewhere += 1


class Garbage:
    """Something that the garbage collector has to find, and to end in Python."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


def look_at_all() -> None:
    for ident in threads_with_frames():
        frames_of_thread(ident)


def nested(depth: int) -> None:
    guard = Guard()  # noqa: F841
    Garbage()
    if depth:
        nested(depth - 1)


@pytest.fixture
def threads_switch_all_the_time() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_switch_all_the_time")
def test_locals_of_a_thread_that_is_looked_at_end_with_their_function() -> None:
    Guard.ended_elsewhere = 0
    looked = 0
    over = threading.Event()

    def look() -> None:
        nonlocal looked
        while not over.is_set():
            look_at_all()
            looked += 1

    watching = threading.Thread(target=look)
    watching.start()
    try:
        until = time.monotonic() + 0.5
        while time.monotonic() < until or looked < 20:
            nested(20)
            assert time.monotonic() < until + 30
    finally:
        over.set()
        watching.join()
    assert Guard.ended_elsewhere == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_stays_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        look_at_all()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_the_frames_of_another_thread_innermost_first() -> None:
    waiting, over = threading.Event(), threading.Event()

    def idle() -> None:
        waiting.set()
        over.wait(30)

    thread = threading.Thread(target=idle)
    thread.start()
    assert waiting.wait(30) and thread.ident in threads_with_frames()
    assert thread.ident is not None
    found = [
        (code.co_name, line)
        for code, line, _ in frames_of_thread(thread.ident)
        if code.co_filename == __file__
    ]
    over.set()
    thread.join(30)
    assert found == [("idle", idle.__code__.co_firstlineno + 2)]
    assert frames_of_thread(thread.ident) == []


_taken = threading.Lock()
_taken.acquire()


class Owner:
    """An object with a lock that is taken."""

    def __init__(self) -> None:
        self.lock = _taken

    def enter(self) -> None:
        with self.lock:
            pass

    def acquire(self) -> None:
        self.lock.acquire()

    def acquire_for_a_while(self) -> None:
        self.lock.acquire(timeout=60)


def _enter_global() -> None:
    with _taken:
        pass


def _enter_local_of_a_global_name() -> None:
    _free = _taken
    with _free:
        pass


_free = threading.Lock()


def _in_a_closure() -> None:
    lock = _taken

    def inner() -> None:
        with lock:
            pass

    inner()


def _of_processes() -> None:
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize(
    ("stands", "waits"),
    [
        (Owner().enter, True),
        (Owner().acquire, True),
        (_enter_global, True),
        (_enter_local_of_a_global_name, True),
        (_in_a_closure, True),
        (lambda: queue.Queue().get(), True),
        (lambda: threading.Event().wait(), True),
        (Owner().acquire_for_a_while, False),
        (lambda: threading.Event().wait(60), False),
        (lambda: time.sleep(60), False),
        (_of_processes, False),
    ],
)
def test_a_thread_that_waits_for_a_lock(stands: Callable[[], object], waits: bool) -> None:
    thread = threading.Thread(target=stands, daemon=True)
    thread.start()
    deadline = time.monotonic() + (5.0 if waits else 0.3)
    while time.monotonic() < deadline and not waits_for_lock(thread.ident or 0):
        time.sleep(0.01)
    assert waits_for_lock(thread.ident or 0) == waits


def test_a_thread_that_has_ended_waits_for_nothing() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert not waits_for_lock(thread.ident or 0)
