"""What a rank writes last, when its recording ends."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from forked_calls import OnRanks

pytestmark = pytest.mark.launches


def events_of_the_end() -> list[str]:
    """End the recording of this rank. Return when it read reduce ops and when it gave a sign."""
    from commlens.capture import session

    recorder = session.recording().recorder
    events: list[str] = []
    read, sign = recorder.decode_reduce_ops, recorder.writer.heartbeat

    def decode_reduce_ops() -> None:
        read()
        events.append("read")

    def heartbeat() -> None:
        sign()
        events.append("sign")

    recorder.decode_reduce_ops, recorder.writer.heartbeat = decode_reduce_ops, heartbeat
    session.stop()
    return events


def test_the_last_sign_comes_after_the_last_reduce_ops(on_ranks: OnRanks) -> None:
    """The watcher reads reduce ops again only after a new sign: else it misses those of the last
    quarter of a second if it looks just before they are read.
    """
    [events] = on_ranks(events_of_the_end, world_size=1)
    assert events[-2:] == ["read", "sign"]
