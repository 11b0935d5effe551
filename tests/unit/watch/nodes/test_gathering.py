"""Evidence that nodes ask one another for, without a store."""

from __future__ import annotations

import threading
import time

import pytest

from commlens.watch.nodes import states_tree
from commlens.watch.nodes.beat import Beat, Request
from commlens.watch.nodes.gathering import Gathering
from commlens.watch.nodes.states import States


def test_states_that_come_too_late_are_not_added_to_those_that_were_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FIRST_S", "LEVEL_S"):
        monkeypatch.setattr(states_tree, name, 0.2)
    node = Gathering("host", None)
    node.update(slot=0, ranks=[0])
    found: list[States | None] = []
    thread = threading.Thread(target=lambda: found.append(node.gather_states(States({b"own": 1}))))
    thread.start()
    end = time.monotonic() + 20
    while node._from_root is None and time.monotonic() < end:
        time.sleep(0.01)
    collecting = node._from_root
    thread.join(30)
    assert collecting is not None
    collecting.add(1, States({b"late": 2}))
    (states,) = found
    assert states is not None and states.by_key == {b"own": 1}


def test_a_request_that_is_seen_again_while_it_is_answered_is_answered_once() -> None:
    node = Gathering("host1", None)
    node.update(slot=1, ranks=[1])
    reporter = Beat(0, "host0", [0], asked=Request(1, 0))
    node._note_requests([reporter], 1.0)
    request = node.take_request()
    assert request is not None
    node._note_requests([reporter], 2.0)  # the exchange goes on while the evidence is packed
    node.answer(request, b"evidence")
    node._note_requests([reporter], 3.0)
    assert node.take_request() is None
