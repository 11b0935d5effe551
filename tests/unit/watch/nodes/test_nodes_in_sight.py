"""The other nodes as one node sees them."""

from __future__ import annotations

import time

import msgspec

from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.meeting_places import Store
from commlens.watch.nodes.nodes_in_sight import Contact, NodesInSight

PLACES = [Store("10.0.0.1", 29500), Store("10.0.0.2", 29500)]


def test_the_oldest_waits_of_many_nodes_are_followed() -> None:
    node = NodesInSight("host0", None)
    node.update(slot=0, ranks=[0])
    node._contact.note_answer(time.monotonic())
    beats = [
        Beat(slot, f"host{slot}", [slot], wait_id=7, wait_s=float(slot)) for slot in range(1, 30)
    ]
    node._known.note(beats, node._contact.answered_at)
    now_ns = time.monotonic_ns()
    found = node.waits(now_ns)
    assert [wait.pid for wait in found] == [-1 - slot for slot in range(29, 21, -1)]
    assert found[0].since_ns == now_ns - 29_000_000_000
    later = [msgspec.structs.replace(beat, count=1, wait_s=beat.wait_s + 3) for beat in beats[:-1]]
    ended = msgspec.structs.replace(beats[-1], count=1, wait_id=0)
    node._known.note([*later, ended], node._contact.answered_at)
    assert node.waits(now_ns + 1_000_000_000) == [
        *found[1:],
        found[-1]._replace(since_ns=now_ns - 21_000_000_000, pid=-22),
    ], "a wait does not begin anew"


def test_a_store_that_never_answered_is_not_lost() -> None:
    contact = Contact([*PLACES])
    contact.has_joined = True
    contact.note_error(ConnectionRefusedError())
    assert not contact.lost_since and not contact.refuses
    contact.has_joined = False
    contact.note_answer(time.monotonic())
    contact.note_error(ConnectionRefusedError())
    assert not contact.lost_since, "no rank here has joined"


def test_a_place_that_answers_again_is_not_lost_but_one_that_was_given_up_is() -> None:
    contact = Contact([*PLACES])
    contact.has_joined = True
    contact.note_answer(time.monotonic())
    contact.note_error(TimeoutError())
    assert contact.lost_since and not contact.is_lost(60)
    contact.note_error(ConnectionRefusedError())
    assert contact.is_lost(60) and contact.lost_refused
    contact.note_answer(time.monotonic())
    assert not contact.is_lost(60) and not contact.lost_since and not contact.lost_refused
    contact.note_error(TimeoutError())
    lost_since = contact.lost_since
    contact.given_up.append(contact.places.pop(0))
    contact.note_answer(time.monotonic())
    assert contact.lost_place == PLACES[0] and contact.lost_since == lost_since
