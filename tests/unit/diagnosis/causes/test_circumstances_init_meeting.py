"""Tests of src/commlens/diagnosis/causes/init_meeting.py."""

from __future__ import annotations

import msgspec
import pytest
from goldens import hold
from starting_ranks import init, rank, verdict

from commlens.diagnosis.causes.circumstances import add_init_meeting
from commlens.diagnosis.words.circumstances import with_init_meeting
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import InitMeeting, StuckInside
from commlens.model.ranklog import RankLog, StoreSeen

HERE = StoreSeen("127.0.0.1:29511", listens=True, agent=False)
CLOSED = StoreSeen("127.0.0.1:29511", listens=False, agent=False)
AGENTS = StoreSeen("127.0.0.1:29511", listens=False, agent=True)


def come(number: int, store: StoreSeen | None, *, life: int = 1) -> RankLog:
    log = rank(number, init(number=life, inc=life - 1))
    log.observation = msgspec.structs.replace(log.observation, store=store)
    return log


@pytest.mark.parametrize(
    ("name", "store"), [("agent-store", AGENTS), ("no-store-of-rank-0", CLOSED)]
)
def test_where_nobody_listens_no_rank_is_to_blame(name: str, store: StoreSeen) -> None:
    found = verdict(*(come(number, store) for number in range(4)))
    assert (found.kind, found.culprits, found.certain) == ("stuck-inside", [], True)
    assert isinstance(found.cause, StuckInside)
    assert (found.cause.state, found.cause.blamed_by) == ("nobody-listens", "nobody")
    hold(f"stuck-inside/init-{name}", found)


@pytest.mark.parametrize(
    "stores",
    [
        [HERE, HERE, HERE, HERE],
        [None, None, None, None],
        [HERE, CLOSED, CLOSED, CLOSED],
        [None, CLOSED, None, None],  # rank 0 may make the store on another host
    ],
)
def test_nothing_is_claimed_of_an_address_that_may_be_served(
    stores: list[StoreSeen | None],
) -> None:
    found = verdict(*(come(number, store) for number, store in enumerate(stores)))
    assert isinstance(found.cause, StuckInside)
    assert found.cause.state == "no-progress"
    assert found.cause.init is not None and found.cause.init.came == [0, 1, 2, 3]


@pytest.mark.parametrize(("came_s_ago", "kind"), [(4.0, "healthy"), (12.0, "stuck-inside")])
def test_ranks_that_start_late_have_time_to_connect(came_s_ago: float, kind: str) -> None:
    """On a busy machine, rank 3 waits for long, and the others have just come."""
    logs = [come(number, HERE) for number in range(4)]
    for log in logs[:3]:
        log.setups[-1].announced_ns = log.captured_ns - int(came_s_ago * 1e9)
    found = verdict(*logs)
    assert (found.kind, found.culprits) == (kind, [])


@pytest.mark.parametrize(
    ("life", "store", "kept"), [(1, HERE, False), (2, None, False), (2, HERE, True)]
)
def test_a_store_may_keep_the_addresses_of_an_earlier_call(
    life: int, store: StoreSeen | None, kept: bool
) -> None:
    found = verdict(*(come(number, store, life=life) for number in range(4)))
    assert isinstance(found.cause, StuckInside) and found.cause.init is not None
    assert found.cause.init.again is (life > 1)
    assert ("PrefixStore" in found.findings[0].next_step) is kept
    if kept:
        hold("stuck-inside/init-again", found)


@pytest.mark.parametrize("life", [1, 2])
def test_a_rank_that_has_not_come_is_named_wherever_the_store_is(life: int) -> None:
    late = rank(2, *([init()] if life > 1 else []), inside=False)
    found = verdict(*(come(number, AGENTS, life=life) for number in (0, 1, 3)), late)
    assert (found.kind, found.culprits) == ("missing", [2])
    assert found.cause is not None and found.cause.init is not None
    meeting = found.cause.init
    assert (meeting.size, meeting.came, meeting.listens) == (4, [0, 1, 3], False)
    evidence = " ".join(found.findings[0].evidence)
    assert "3 of 4 ranks" in evidence and "TORCHELASTIC_USE_AGENT_STORE" in evidence


def test_the_ranks_of_a_second_world_meet_by_themselves() -> None:
    """Processes 2 to 4 are ranks 0 to 2 of the second world; process 2 makes its store."""
    found = verdict(*(come(number, CLOSED) for number in range(4)))
    assert isinstance(found.cause, StuckInside)
    cause = msgspec.structs.replace(found.cause, state="no-progress")
    add_init_meeting(cause, range(2, 5), {2: CLOSED, 3: HERE})
    assert cause.init == InitMeeting(3, [2, 3], [4], 2, CLOSED.address, listens=False)
    assert cause.state == "no-progress"
    add_init_meeting(cause, range(2, 5), dict.fromkeys(range(2, 5), CLOSED))
    assert cause.state == "nobody-listens"
    said = with_init_meeting(Words(""), cause)
    assert "rank 2 is to make the store there" in said.explanation.lower()
