"""The watchdog thread wakes the threads that wait for a refused collective: it aborts their group
once, and does not wait for that.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.blackbox.writer import BoxWriter
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


def test_each_refused_group_is_aborted_once_and_ticks_go_on(tmp_path: Path) -> None:
    writer = BoxWriter(
        tmp_path / "box",
        capacity=16,
        rank=0,
        world_size=2,
        local_rank=0,
        start_ticks=1,
        about={"job": "job"},
    )
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
