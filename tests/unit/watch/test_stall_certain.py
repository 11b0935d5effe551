"""What is certainly wrong, whoever is to blame: abort_on=stall asks for it."""

from __future__ import annotations

from typing import cast

import pytest

from commlens.blackbox.reader import OpenBox
from commlens.model.cause import NoRecord, Unrecorded
from commlens.model.verdict import Finding, Kind, Verdict
from commlens.processes.process import Handle
from commlens.watch.roster import Member
from commlens.watch.stall import reason_to_go_on


def finding(kind: Kind, *, root_cause: bool = True) -> Finding:
    return Finding(
        kind=kind,
        why="unknown",
        root_cause=root_cause,
        culprits=[],
        victims=[0, 1],
        confidence="low",
        summary="",
    )


@pytest.mark.parametrize(
    ("kind", "certain"),
    [
        ("mismatch/shape", True),
        ("cycle", True),
        ("dead", True),
        ("missing", False),
        ("stuck-inside", False),
    ],
)
def test_a_fault_that_no_rank_can_leave_ends_the_job_whoever_is_to_blame(
    kind: Kind, certain: bool
) -> None:
    verdict = Verdict.from_findings([finding(kind)])
    assert verdict.certain == certain
    assert reason_to_go_on(verdict, [], set()) == (
        "" if certain else "the verdict's confidence is low"
    )


def test_a_consequence_is_not_certain() -> None:
    assert not finding("dead", root_cause=False).certain


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
