"""Sends meet receives: each message has a place among those of its tag."""

from __future__ import annotations

from commlens.model.collective import Channel, ProcessGroup
from commlens.watch.mismatches.channel_progress import MAX_PENDING
from commlens.watch.mismatches.comparison import Messages, SignatureComparison
from commlens.watch.mismatches.deferred_verification import MessageEnd


def ends(backend: str = "gloo") -> tuple[MessageEnd, MessageEnd]:
    channel = Channel(ProcessGroup("0", (0, 1), "", backend), "cpu")
    messages = Messages(channel, 0, 1)
    return MessageEnd(messages), MessageEnd(messages)


def test_messages_of_a_tag_meet_in_their_order() -> None:
    sends, receives = ends()
    first, second = sends.place(1, 7), sends.place(2, 8)
    assert first is not None and second is not None and first != second
    assert receives.place(1, 8) == second
    assert receives.place(2, 7) == first


def test_nccl_ignores_tags() -> None:
    sends, receives = ends("nccl")
    assert sends.place(1, 7) == receives.place(1, 8)


def test_a_gap_is_harmless_with_one_tag_and_ends_the_pairing_with_several() -> None:
    sends, receives = ends()
    place = sends.place(3, 7)
    assert place is not None and place[1] == 3, "the records before are overwritten"
    for number in (1, 2):
        assert receives.place(number, 7) != place
    assert receives.place(3, 7) == place
    sends.place(4, 8)
    assert sends.messages.pairing_lost and receives.place(4, 7) is None


def test_numbers_that_go_back_end_the_pairing() -> None:
    sends, receives = ends()
    sends.place(2, 0)
    assert sends.place(1, 0) is None and sends.messages.pairing_lost
    assert receives.place(1, 0) is None


def test_memory_is_bounded() -> None:
    sends, _ = ends()
    comparison = SignatureComparison((0, 1))
    for number in range(1, MAX_PENDING + 3):
        place = sends.place(number, 0)
        assert place is not None
        comparison.add(*place, 0, (number, 0, 0))
        comparison.trim([place[0]])
    assert len(place[0].first_issue) == MAX_PENDING + 1 and comparison.given_up == 1
