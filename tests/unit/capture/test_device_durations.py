"""When a rank reads how long its collectives took on the device, and what it records."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.blackbox import layout as L
from commlens.capture import device_durations, torch_progress
from commlens.capture.device_durations import EVERY_NS, DeviceDurations
from commlens.tap import torch_offers


class Rank:
    """A rank whose recorder knows the durations in ``known``, and the records that it wrote."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, bool], int] = {}
        self.written: dict[int, int] = {}
        self.readings = 0
        self.lock = threading.Lock()
        writer = SimpleNamespace(capacity=100, mark_value=self._mark)
        self.durations = DeviceDurations(writer, self._read)

    def _read(self) -> torch_progress.Durations:
        assert self.lock.locked()
        self.readings += 1
        return {"0": self.known}

    def _mark(self, offset: int, field: int, index: int, value: int) -> None:
        assert field == L.DURATION and offset == 64 * index
        self.written[index] = value * L.TICK_NS

    def issue(self, first: int, last: int, op: str = "all_reduce") -> None:
        channel = SimpleNamespace(backend=SimpleNamespace(uid="0"))
        for number in range(first, last + 1):
            token: Any = SimpleNamespace(
                args=SimpleNamespace(channel=channel, op=op),
                backend_number=number,
                offset=64 * number,
                index=number,
            )
            self.durations.add(token)

    def look(self, now_ns: int) -> None:
        self.durations.look(now_ns, self.lock)


def test_durations_are_recorded_once_they_are_known() -> None:
    rank = Rank()
    rank.issue(1, 20)
    rank.known = {(number, False): 1000 * number * L.TICK_NS for number in range(1, 16)}
    rank.look(1)
    assert rank.written == {number: 1000 * number * L.TICK_NS for number in range(1, 16)}
    rank.known = {(number, False): 500 * L.TICK_NS for number in range(1, 31)}
    rank.issue(21, 30)
    rank.look(2 * EVERY_NS)
    assert sorted(rank.written) == [*range(1, 31)]
    assert rank.written[15] == 15_000 * L.TICK_NS, "each is written once"


def test_the_record_that_closes_a_coalesced_group_has_its_own() -> None:
    rank = Rank()
    rank.issue(2, 20, op="coalesced")
    rank.known = {(number, False): 300 * L.TICK_NS for number in range(1, 21)}
    rank.look(1)
    assert rank.written == {}
    rank.known = {(number, True): 300 * L.TICK_NS for number in range(1, 21)}
    rank.look(2 * EVERY_NS)
    assert sorted(rank.written) == [*range(2, 21)]


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


def test_what_the_recorder_no_longer_holds_is_forgotten() -> None:
    rank = Rank()
    rank.issue(1, 30)
    rank.known = {(number, False): L.TICK_NS for number in range(21, 31)}
    rank.look(1)
    assert sorted(rank.written) == [*range(21, 31)]
    rank.look(2 * EVERY_NS)
    assert rank.readings == 1, "nothing is left to be read"


def test_the_entries_of_another_form_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"duration_ms": 1.5, "is_p2p": False, "profiling_name": "nccl:all_reduce"}
    for entries, found in (
        ([{**entry, "pg_id": 3, "collective_seq_id": 7}], {"3": {(7, False): 1_500_000}}),
        ([{**entry, "pg_id": 3, "collective_seq_id": 7, "is_p2p": True}], {}),
        ([{"pg_id": 3, "collective_seq_id": 7, "is_p2p": False}], {}),
        ([{**entry, "pg_id": 3}], {}),
        ([3], {}),
    ):
        monkeypatch.setattr(torch_offers, "nccl_entries", lambda entries=entries: entries)
        assert torch_progress.durations() == found
