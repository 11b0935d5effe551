"""What follows from verdicts on a stall: whether they stand, and whether they may end the job."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from builders import Job, training

from commlens.blackbox.reader import OpenBox
from commlens.model.cause import NoRecord, StuckInside, Unrecorded
from commlens.model.verdict import CollectiveRef, Finding, GroupRef, Kind, Verdict
from commlens.processes.process import Handle
from commlens.watch.roster import Member
from commlens.watch.stall_verdicts import (
    end_of_wait,
    explains,
    leaves_standing,
    reason_to_go_on,
    waited_for,
)

MISSING = Verdict(kind="missing", culprits=[1], victims=[0])


def finding(kind: Kind, *, certain: bool = False) -> Finding:
    return Finding(
        kind=kind,
        why="unknown",
        root_cause=True,
        culprits=[],
        victims=[0, 1],
        confidence="low",
        certain=certain,
        summary="",
    )


@pytest.mark.parametrize("certain", [True, False])
def test_a_certain_fault_ends_the_job_whoever_is_to_blame(certain: bool) -> None:
    verdict = Verdict.from_findings([finding("cycle", certain=certain)])
    assert verdict.certain == certain
    assert reason_to_go_on(verdict, [], set()) == (
        "" if certain else "the verdict's confidence is low"
    )


@pytest.mark.parametrize(
    ("reason", "doubt"),
    [("not-started", ""), ("out-of-sight", "there is no record of ranks 2-3 here")],
)
def test_ranks_that_were_never_started_are_not_waited_for(reason: NoRecord, doubt: str) -> None:
    """All ranks meet at an address of this node, on which there is no process of theirs."""
    cause = Unrecorded(
        kind="missing",
        why="unknown",
        root_cause=True,
        blamed_by="absence",
        confidence="medium",
        ranks=[2, 3],
        processes=["unrecorded", "unrecorded"],
        reason=reason,
        waits=[],
        job_size=4,
    )
    found = finding("missing")
    found.cause, found.confidence = cause, "medium"
    seen = [
        Member(pid, 0, rank, 4, rank, 0, Handle.invisible(pid), box=cast(OpenBox, object()))
        for rank, pid in enumerate((101, 102))
    ]
    assert reason_to_go_on(Verdict.from_findings([found]), seen, set()) == doubt


def test_a_death_replaces_a_verdict_on_others_who_waited_for_it() -> None:
    group, collective = GroupRef("0", "default_pg", [0, 1, 2, 3]), CollectiveRef("all_reduce", 1)
    earlier = Verdict(
        kind="missing",
        root_cause=True,
        culprits=[0, 3],
        victims=[1],
        group=group,
        collective=collective,
    )
    death = Verdict(
        kind="dead",
        root_cause=True,
        culprits=[2],
        victims=[0, 1, 3],
        group=group,
        collective=collective,
    )
    assert explains(death, earlier)
    assert not explains(msgspec.structs.replace(death, culprits=[3]), earlier), "it was named"
    assert not explains(
        msgspec.structs.replace(death, collective=CollectiveRef("all_reduce", 2)), earlier
    )


def test_waited_for() -> None:
    assert waited_for(MISSING) == [1]
    assert waited_for(
        Verdict(kind="waiting", victims=[0, 2], group=GroupRef("0", "default_pg", [0, 1, 2]))
    ) == [1]
    assert waited_for(Verdict(kind="cycle", culprits=[1])) == []


def test_nobody_is_waited_for_inside_a_collective_that_all_have_reached() -> None:
    group = GroupRef("0", "default_pg", [0, 1, 2])
    inside = StuckInside(
        kind="waiting",
        why="in-collective",
        root_cause=False,
        blamed_by="nobody",
        confidence="low",
        victims=[1],
        state="completion-unknown",
        ranks=[1],
        waits=[],
    )
    verdict = Verdict(kind="waiting", victims=[1], group=group, cause=inside)
    assert waited_for(verdict) == []
    line = end_of_wait(verdict, 0, Job(3).run(training(lambda *_: None)).logs(), 9_000_000_000)
    assert line == "the wait ended after 9 s; the job goes on."


def test_a_job_in_which_a_rank_has_raised_is_not_said_to_go_on() -> None:
    logs = Job(2).run(training(lambda *_: None)).logs()
    logs[1].exception = "KeyboardInterrupt"
    assert end_of_wait(MISSING, 0, logs, 9_000_000_000) == ""


@pytest.mark.parametrize(
    ("kind", "why", "culprit", "stands"),
    [
        ("dead", "killed", 1, True),
        ("dead", "killed", 0, True),
        ("dead", "killed", 7, False),  # nobody knew of it: it may be the cause
        ("dead", "out-of-memory", 1, False),
        ("missing", "killed", 1, True),  # it says the same
        ("missing", "killed", 0, False),
    ],
)
def test_ranks_that_are_killed_while_the_job_hangs_leave_the_verdict_standing(
    kind: Any, why: Any, culprit: int, stands: bool
) -> None:
    finding = Finding(
        kind=kind,
        why=why,
        root_cause=True,
        culprits=[culprit],
        victims=[],
        confidence="high",
        summary="",
    )
    death = Verdict(kind=kind, root_cause=True, culprits=[culprit], findings=[finding])
    assert leaves_standing(death, MISSING) is stands
