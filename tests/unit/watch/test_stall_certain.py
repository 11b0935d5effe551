"""What is certainly wrong, whoever is to blame: on_stall=abort asks for it."""

from __future__ import annotations

import pytest

from commlens.model.verdict import Finding, Kind, Verdict
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
