"""The watchdog thread wakes the threads that wait for a refused collective: it aborts their group
once, and does not wait for that.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from new_boxes import new_box

pytest.importorskip("torch")

from commlens.blackbox import layout as L
from commlens.blackbox.reader import read_status
from commlens.capture import rank_environment
from commlens.capture.device_queues import DeviceQueues
from commlens.capture.library_calls import LibraryCalls
from commlens.capture.watchdog import Watchdog

BRIEFLY_S = 10.0


class Group:
    """A process group whose ``abort`` blocks, as NCCL's may."""

    def __init__(self) -> None:
        self.aborts = threading.Semaphore(0)
        self.may_return = threading.Event()

    def abort(self) -> None:
        self.aborts.release()
        self.may_return.wait()


class Verifier:
    """Knows the groups of refusals that this rank has not raised."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    @property
    def posted_refusals(self) -> int:
        return len(self.groups)

    def unraised_refusal(self) -> str | None:
        return "refused" if self.groups else None

    def refused_groups(self, in_flight: list[Any]) -> list[Group]:
        return self.groups


def test_the_oldest_of_a_librarys_call_and_a_collective_on_a_device_is_written(
    tmp_path: Path,
) -> None:
    writer = new_box(tmp_path, capacity=16)
    channel = SimpleNamespace(backend=SimpleNamespace(timeout_ms=600_000))
    now = time.monotonic_ns()
    on_device = SimpleNamespace(since=now + 1000, index=4, args=SimpleNamespace(channel=channel))
    call = SimpleNamespace(since=now + 2000, index=5)
    heads: list[Any] = [on_device]
    recorder: Any = SimpleNamespace(
        writer=writer,
        device_queues=SimpleNamespace(oldest=lambda: heads[0], waits_since=lambda one: one.since),
        library_calls=SimpleNamespace(oldest=lambda: call),
    )

    def written() -> tuple[int, int, int]:
        Watchdog(recorder)._write_oldest(None)
        status = read_status(writer.path.read_bytes()[: L.HEADER_SIZE])
        return status.oldest_index, status.oldest_mono_ns, status.expires_mono_ns

    assert written() == (4, now + 1000, now + 1000 + 600 * 10**9)
    heads[0] = None
    assert written() == (5, now + 2000, L.NEVER), "torch's watchdog knows nothing of the call"
    heads[0] = SimpleNamespace(**{**vars(on_device), "since": now + 3000})
    assert written() == (5, now + 2000, L.NEVER)


def test_the_timeout_is_that_of_the_oldest_group_only_while_it_has_the_oldest_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_environment, "default_timeout_ms", lambda: 600_000)
    writer = new_box(tmp_path, capacity=16)
    writer.word(L.TIMEOUT_MS, 600_000)
    channel = SimpleNamespace(backend=SimpleNamespace(timeout_ms=30_000))
    on_device = SimpleNamespace(since=1, index=4, args=SimpleNamespace(channel=channel))
    heads: list[Any] = [on_device]
    recorder: Any = SimpleNamespace(
        writer=writer,
        device_queues=SimpleNamespace(oldest=lambda: heads[0], waits_since=lambda one: one.since),
        library_calls=SimpleNamespace(oldest=lambda: None),
    )
    watchdog = Watchdog(recorder)
    of_a_thread: Any = SimpleNamespace(since=2, index=5)

    def timeout_s(oldest: Any) -> float:
        watchdog._write_oldest(oldest)
        return read_status(writer.path.read_bytes()[: L.HEADER_SIZE]).timeout_s

    assert timeout_s(None) == 30.0
    heads[0] = None
    assert timeout_s(of_a_thread) == 600.0
    assert timeout_s(None) == 600.0


def test_a_thread_that_does_not_end_keeps_its_pipe(tmp_path: Path) -> None:
    """Another file might get the number of a descriptor that is closed."""
    in_tick, may_end = threading.Event(), threading.Event()

    def tick(now: int) -> None:
        in_tick.set()
        may_end.wait()

    recorder: Any = SimpleNamespace(
        writer=new_box(tmp_path, capacity=16),
        sweep=lambda: None,
        decode_reduce_ops=lambda: None,
    )
    watchdog = Watchdog(recorder, pipe=tmp_path / "pipe", on_tick=tick)
    watchdog.start()
    descriptor = watchdog._pipe_descriptor
    try:
        assert in_tick.wait(BRIEFLY_S)
        watchdog.stop(timeout=0.01)
        os.fstat(descriptor)
        assert not (tmp_path / "pipe").exists()
    finally:
        may_end.set()
        watchdog.stop(timeout=BRIEFLY_S)
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_each_refused_group_is_aborted_once_and_ticks_go_on(tmp_path: Path) -> None:
    writer = new_box(tmp_path, capacity=16)
    oldest = SimpleNamespace(since=0, index=1, args=None)
    verifier = Verifier()
    queues = DeviceQueues(SimpleNamespace(writer=writer))
    recorder: Any = SimpleNamespace(
        writer=writer,
        verifier=verifier,
        sweep=lambda: oldest,
        decode_reduce_ops=lambda: None,
        device_queues=queues,
        library_calls=LibraryCalls(SimpleNamespace(writer=writer)),
    )
    watchdog = Watchdog(recorder)
    first, second = Group(), Group()
    try:
        for new in (first, second):
            verifier.groups.append(new)
            for _ in range(5):
                watchdog.tick()
            assert new.aborts.acquire(timeout=BRIEFLY_S)
        assert not first.aborts.acquire(blocking=False)
        assert not second.aborts.acquire(blocking=False)
    finally:
        for each in (first, second):
            each.may_return.set()
