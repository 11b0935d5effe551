"""Sends meet receives."""

from __future__ import annotations

from commlens.model.collective import Channel, ProcessGroup
from commlens.watch.mismatches.channel_progress import MAX_PENDING
from commlens.watch.mismatches.message_stream import MessageStream, StreamEnd


def ends(backend: str = "gloo") -> tuple[StreamEnd, StreamEnd]:
    channel = Channel(ProcessGroup("0", (0, 1), "", backend), "cpu")
    stream = MessageStream(channel, 0, 1)
    return StreamEnd(stream, is_sender=True), StreamEnd(stream, is_sender=False)


def test_messages_of_a_tag_meet_in_their_order() -> None:
    sends, receives = ends()
    assert sends.match(10, 1, 7) is None and sends.match(11, 2, 8) is None
    assert receives.match(21, 1, 8) == (11, 21)
    assert receives.match(20, 2, 7) == (10, 20)


def test_nccl_ignores_tags() -> None:
    sends, receives = ends("nccl")
    sends.match(10, 1, 7)
    assert receives.match(20, 1, 8) == (10, 20)


def test_a_gap_is_harmless_with_one_tag_and_ends_the_pairing_with_several() -> None:
    sends, receives = ends()
    assert sends.match(10, 3, 7) is None, "the records before are overwritten"
    for number in (1, 2):
        receives.match(20, number, 7)
    assert receives.match(23, 3, 7) == (10, 23)
    sends.match(11, 4, 8)
    assert sends.stream.pairing_lost and receives.match(24, 4, 7) is None


def test_numbers_that_go_back_end_the_pairing() -> None:
    sends, receives = ends()
    sends.match(10, 2, 0)
    assert sends.match(11, 1, 0) is None and sends.stream.pairing_lost
    assert receives.match(20, 1, 0) is None


def test_memory_is_bounded() -> None:
    sends, _ = ends()
    for number in range(1, MAX_PENDING + 3):
        sends.match(number, number, 0)
    assert len(sends.stream.unmatched) == MAX_PENDING and sends.stream.dropped == 2
