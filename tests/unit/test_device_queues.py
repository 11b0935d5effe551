"""When the watchdog thread asks torch's recorder about collectives on a device."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from commlens.capture import device_queues, torch_progress
from commlens.capture.device_queues import DeviceQueues

LATER_NS = 10 * device_queues.QUIET_NS


class Channel:
    """A group's channel, which carried a message."""

    pairs: ClassVar = {1: 1}
    backend = SimpleNamespace(uid="0")


def queues_with_one_in_flight(monkeypatch: pytest.MonkeyPatch) -> DeviceQueues:
    """One collective on a group that carries messages, too: only the entries of torch's recorder tell its state."""
    monkeypatch.setattr(torch_progress, "statuses", lambda: {"0": torch_progress.Status(1, -1, -1)})
    channel = Channel()
    token: Any = SimpleNamespace(
        args=SimpleNamespace(channel=channel, op="all_reduce"), result=None, backend_number=1, since=1, waiting=False, known_how=0,
        offset=0, index=1,
    )  # fmt: skip
    queues = DeviceQueues(lambda *_: None, lambda *_: None, lambda *_: None, lambda: 1, 100)
    queues.add(token)
    return queues


def test_a_capture_begins_when_no_query_is_under_way(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    asked, answer, began = threading.Event(), threading.Event(), threading.Event()

    def in_flight() -> None:
        asked.set()
        answer.wait(10)

    def capture() -> None:
        queues.capture_begins()
        began.set()

    monkeypatch.setattr(torch_progress, "in_flight", in_flight)
    monkeypatch.setattr(device_queues, "LONGEST_QUERY_S", 10.0)
    threads = [threading.Thread(target=queues.look, args=(LATER_NS,)), threading.Thread(target=capture)]
    threads[0].start()
    assert asked.wait(10)
    threads[1].start()
    assert not began.wait(0.1)
    answer.set()
    assert began.wait(10)
    for thread in threads:
        thread.join(10)


def test_a_query_that_does_not_end_holds_no_capture_up(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    monkeypatch.setattr(device_queues, "LONGEST_QUERY_S", 0.05)
    monkeypatch.setattr(torch_progress, "in_flight", queues.capture_begins)  # as if by another thread
    queues.look(LATER_NS)


def test_nothing_is_queried_during_a_capture(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    queried = []
    monkeypatch.setattr(torch_progress, "in_flight", lambda: queried.append(1))
    queues.capture_begins()
    queues.look(LATER_NS)
    assert not queried
    queues.capture_ends()
    queues.look(2 * LATER_NS)
    assert queried == [1]
