"""Sends meet receives: each message has a place among those of its tag."""

from __future__ import annotations

from commlens.model.collective import Channel, ProcessGroup
from commlens.watch.mismatches.channel_progress import MAX_PENDING
from commlens.watch.mismatches.comparison import Messages, SignatureComparison
from commlens.watch.mismatches.record_reader import MessageEnd


def ends(backend: str = "gloo") -> tuple[MessageEnd, MessageEnd]:
    channel = Channel(ProcessGroup("0", (0, 1), "", backend), "cpu")
    messages = Messages(channel, 0, 1)
    return MessageEnd(messages), MessageEnd(messages)


def test_messages_of_a_tag_meet_in_their_order() -> None:
    sends, receives = ends()
    first, second = sends.add(1, 7), sends.add(2, 8)
    assert first is not None and second is not None and first != second
    assert receives.add(1, 8) == second
    assert receives.add(2, 7) == first


def test_nccl_ignores_tags() -> None:
    sends, receives = ends("nccl")
    assert sends.add(1, 7) == receives.add(1, 8)


def test_a_gap_is_harmless_with_one_tag_and_ends_the_pairing_with_several() -> None:
    sends, receives = ends()
    place = sends.add(3, 7)
    assert place is not None and place[1] == 3, "the records before are overwritten"
    for number in (1, 2):
        assert receives.add(number, 7) != place
    assert receives.add(3, 7) == place
    sends.add(4, 8)
    assert sends.messages.pairing_lost and receives.add(4, 7) is None


def test_numbers_that_go_back_end_the_pairing() -> None:
    sends, receives = ends()
    sends.add(2, 0)
    assert sends.add(1, 0) is None and sends.messages.pairing_lost
    assert receives.add(1, 0) is None


def test_memory_is_bounded() -> None:
    sends, _ = ends()
    comparison = SignatureComparison((0, 1))
    for number in range(1, MAX_PENDING + 3):
        place = sends.add(number, 0)
        assert place is not None
        comparison.add(*place, 0, (number, 0, 0))
        comparison.trim([place[0]])
    assert len(place[0].first_issue) == MAX_PENDING + 1 and comparison.given_up == 1
