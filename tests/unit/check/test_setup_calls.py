"""The calls that make groups and use stores, as events."""

from __future__ import annotations

import pytest

from commlens.check.notes import RankNotes
from commlens.check.sequence import RankSequence, StoreCall
from commlens.check.setup_calls import SetupCalls
from commlens.tap.groups import Groups


def calls() -> SetupCalls:
    return SetupCalls(RankNotes(RankSequence(1, 4)), Groups())


def test_all_ranks_may_wait_for_a_key_and_none_for_one_that_is_written() -> None:
    made = calls()
    made.store_call("store.set", ("port",))
    made.store_call("store.wait", ("port", "host"))
    written, awaited = made._notes.sequence.events
    assert isinstance(written, StoreCall) and isinstance(awaited, StoreCall)
    assert (written.waits, written.call.channel.group.ranks) == (False, ())
    assert (awaited.waits, awaited.call.channel.group.ranks) == (True, (0, 1, 2, 3))
    assert awaited.call.module == "and 1 more"


@pytest.mark.parametrize(("port", "unseen"), [(29500, 0), (60999, 0), (1234, 1)])
def test_a_store_at_a_port_of_the_programs_own_is_not_seen(
    port: int, unseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    made = calls()
    made.note_store("localhost", port)
    assert len(made._notes.sequence.unseen) == unseen
