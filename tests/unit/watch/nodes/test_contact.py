"""How the place where nodes meet is lost, and found again."""

from __future__ import annotations

import time

from commlens.watch.nodes.contact import Contact
from commlens.watch.nodes.meeting_places import Store

PLACES = [Store("10.0.0.1", 29500), Store("10.0.0.2", 29500)]


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
