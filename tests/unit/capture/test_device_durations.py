"""When a rank reads how long its collectives took on the device, and what it records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.blackbox import layout as L
from commlens.capture import device_durations, torch_progress
from commlens.capture.device_durations import EVERY_NS, DeviceDurations
from commlens.tap import recorder_dumps


class Rank:
    """A rank whose recorder knows the durations in ``known``, and the records that it wrote."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], int] = {}
        self.written: dict[int, int] = {}
        self.readings = 0
        self.read_ns = 0
        self.on_mark: Callable[[], object] = lambda: None
        self.lock = threading.Lock()
        writer = SimpleNamespace(capacity=100, mark_value=self._mark, word=self._word)
        self.durations = DeviceDurations(writer, self._read)

    def _read(self) -> torch_progress.Durations:
        assert self.lock.locked()
        self.readings += 1
        return {"0": self.known}

    def _word(self, offset: int, value: int) -> None:
        assert offset == L.TIMED
        self.read_ns = value

    def _mark(self, offset: int, field: int, index: int, value: int) -> None:
        assert field == L.DURATION and offset == 64 * index
        self.written[index] = value * L.TICK_NS
        self.on_mark()

    def issue(self, first: int, last: int, op: str = "all_reduce", uid: str = "0") -> None:
        channel = SimpleNamespace(backend=SimpleNamespace(uid=uid))
        for number in range(first, last + 1):
            token: Any = SimpleNamespace(
                args=SimpleNamespace(channel=channel, op=op),
                backend_number=number,
                offset=64 * number,
                index=number,
            )
            self.durations.add(token)

    def send(self, index: int, op: str) -> None:
        """Issue a message, or close a batch."""
        channel = SimpleNamespace(backend=SimpleNamespace(uid="0"))
        token: Any = SimpleNamespace(
            args=SimpleNamespace(channel=channel, op=op),
            backend_number=0,
            offset=64 * index,
            index=index,
        )
        self.durations.add_message(token)

    def look(self, now_ns: int) -> None:
        self.durations.look(now_ns, self.lock)


def test_durations_are_recorded_once_they_are_known() -> None:
    rank = Rank()
    rank.issue(1, 20)
    rank.known = {("alone", number): 1000 * number * L.TICK_NS for number in range(1, 16)}
    rank.look(1)
    assert rank.written == {number: 1000 * number * L.TICK_NS for number in range(1, 16)}
    rank.known = {("alone", number): 500 * L.TICK_NS for number in range(1, 31)}
    rank.issue(21, 30)
    rank.look(2 * EVERY_NS)
    assert rank.read_ns == 2 * EVERY_NS, "the watcher learns when"
    assert sorted(rank.written) == [*range(1, 31)]
    assert rank.written[15] == 15_000 * L.TICK_NS, "each is written once"


def test_the_record_that_closes_a_coalesced_group_has_its_own() -> None:
    rank = Rank()
    rank.issue(2, 20, op="coalesced")
    rank.known = {("alone", number): 300 * L.TICK_NS for number in range(1, 21)}
    rank.look(1)
    assert rank.written == {}
    rank.known = {("coalesced", number): 300 * L.TICK_NS for number in range(1, 21)}
    rank.look(2 * EVERY_NS)
    assert sorted(rank.written) == [*range(2, 21)]


def test_messages_are_numbered_by_themselves() -> None:
    rank = Rank()
    rank.issue(1, 10)
    for index, op in ((11, "send"), (12, "recv"), (13, "coalesced"), (14, "recv")):
        rank.send(index, op)
    rank.known = {("send", 1): L.TICK_NS, ("recv", 2): 2 * L.TICK_NS, ("batch", 3): 3 * L.TICK_NS}
    rank.known["send", 4] = L.TICK_NS  # of another kind than what was issued fourth
    rank.look(1)
    assert rank.written == {11: L.TICK_NS, 12: 2 * L.TICK_NS, 13: 3 * L.TICK_NS}


def test_entries_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: str, collective: int, message: int, *, is_p2p: bool = False) -> dict[str, Any]:
        return {
            "profiling_name": f"nccl:{name}",
            "pg_id": 0,
            "collective_seq_id": collective,
            "p2p_seq_id": message,
            "is_p2p": is_p2p,
            "duration_ms": len(name) / 1000,
        }

    entries = [
        entry("all_reduce", 3, 0),
        entry("send 0->1", 3, 1, is_p2p=True),
        {**entry("recv 0<-1", 3, 2, is_p2p=True), "duration_ms": None},  # of a batch
        entry("coalesced", 3, 2),
        entry("ALLGATHER_coalesced", 4, 2),
    ]
    monkeypatch.setattr(recorder_dumps, "nccl_entries", lambda: entries)
    known = torch_progress.durations()["0"]
    assert known["alone", 3] == 10_000 and known["send", 1] == known["batch", 2] == 9_000
    assert known["coalesced", 4] == 19_000 and ("recv", 2) not in known


def test_nothing_is_read_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.issue(1, 5)
    rank.look(1)
    assert rank.readings == 0, "too few to be worth it"
    rank.issue(6, 20)
    rank.look(2)
    rank.look(3)
    assert rank.readings == 1, "5 s apart at least"
    monkeypatch.setattr(device_durations, "TIME_SHARE", 1e-9)
    rank.look(2 * EVERY_NS)
    rank.look(100 * EVERY_NS)
    assert rank.readings == 2, "the more it costs, the less often"


def test_nothing_is_read_after_a_capture() -> None:
    """A reading queries events, which breaks the capture of a CUDA graph."""
    rank = Rank()
    rank.issue(1, 20)
    rank.durations.end()
    rank.issue(21, 40)
    rank.look(1)
    assert rank.readings == 0


def test_a_capture_may_begin_while_durations_are_recorded() -> None:
    rank = Rank()
    rank.issue(1, 20)
    rank.issue(21, 22, uid="1")
    rank.known = {("alone", 1): 1000 * L.TICK_NS}
    rank.on_mark = rank.durations.end
    rank.look(1)
    assert list(rank.written) == [1] and rank.read_ns == 1


def test_what_the_recorder_no_longer_holds_is_forgotten() -> None:
    rank = Rank()
    rank.issue(1, 30)
    rank.known = {("alone", number): L.TICK_NS for number in range(21, 31)}
    rank.look(1)
    assert sorted(rank.written) == [*range(21, 31)]
    rank.look(2 * EVERY_NS)
    assert rank.readings == 1, "nothing is left to be read"


def test_the_entries_of_another_form_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"duration_ms": 1.5, "is_p2p": False, "profiling_name": "nccl:all_reduce"}
    for entries, found in (
        ([{**entry, "pg_id": 3, "collective_seq_id": 7}], {"3": {("alone", 7): 1_500_000}}),
        ([{**entry, "pg_id": 3, "collective_seq_id": 7, "is_p2p": True}], {}),
        ([{"pg_id": 3, "collective_seq_id": 7, "is_p2p": False}], {}),
        ([{**entry, "pg_id": 3}], {}),
        ([3], {}),
    ):
        monkeypatch.setattr(recorder_dumps, "nccl_entries", lambda entries=entries: entries)
        assert torch_progress.durations() == found
