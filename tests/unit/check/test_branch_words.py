"""Tests of src/commlens/check/branch_words.py."""

from __future__ import annotations

from typing import Any

import pytest

from commlens.check import branch_words
from commlens.check.branches import BranchLine, Choice
from commlens.check.explore import Alone, Explored
from commlens.check.judge import Checked
from commlens.check.schedule import Outcome
from commlens.diagnosis.examine import ExaminedJob
from commlens.model.collective import Frame
from commlens.model.verdict import Verdict

UNUSED: Any = None
TRUE, FALSE = Choice("a.py", 1, value=True), Choice("a.py", 1, value=False)


def checked(kind: Any = "healthy", summary: str = "no deadlock in 2 steps") -> Checked:
    verdict = Verdict(kind=kind, summary=summary)
    job = ExaminedJob(verdict, UNUSED, UNUSED, UNUSED)
    return Checked(job, Outcome({}, [], [], 0))


def decision(line: int, how: Any = "truth", **about: Any) -> BranchLine:
    return BranchLine(Frame("/home/a.py", line, "f"), how, **{"alike": True, **about})


def explored(*decisions: BranchLine, result: Checked | None = None, **about: Any) -> Explored:
    choices = about.get("choices", ())
    given: dict[str, Any] = {
        "choices": (),
        "deciding": choices,
        "tried": [()],
        "combinations": 1,
        "alone": [],
    }
    return Explored(result or checked(), decisions=list(decisions), **{**given, **about})


def test_a_program_without_decisions_is_proven() -> None:
    verdict = branch_words.verdict(explored())
    assert verdict.summary == "no deadlock in 2 steps"
    assert verdict.missing_evidence == []


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (decision(7, taken=(False,)), ["a.py:7 (false)"]),
        (decision(7, taken=(False,), alike=False), ["a.py:7 (false)", "differently at a.py:7"]),
        (decision(7, "number"), ["a.py:7=0,1"]),
        (decision(7, "shape"), ["a.py:7"]),
        (decision(1, forced=True), []),
    ],
)
def test_each_way_to_decide_has_its_limit(found: BranchLine, lines: list[str]) -> None:
    choices = (FALSE,) if found.forced else ()
    limits = branch_words.verdict(explored(found, choices=choices)).missing_evidence
    assert len(limits) == len(lines)
    assert all(line in limit for line, limit in zip(lines, limits, strict=True))


def test_a_proof_says_which_branches_it_holds_for() -> None:
    taken = branch_words.verdict(explored(decision(7, taken=(False,))))
    assert taken.summary == "no deadlock in 2 steps on the branches taken"
    both = explored(choices=(FALSE,), tried=[(FALSE,), (TRUE,)], combinations=2)
    assert branch_words.verdict(both).summary.endswith("in all 2 combinations of answers at a.py:1")
    some = branch_words.verdict(both._replace(combinations=4))
    assert some.summary.endswith("in 2 of the 4 combinations of answers at a.py:1")
    assert any("2 of 4 combinations" in limit for limit in some.missing_evidence)


def test_a_fault_says_for_which_answers_it_occurs() -> None:
    fault = explored(
        result=checked("cycle", "ranks wait"), choices=(TRUE,), tried=[(FALSE,), (TRUE,)]
    )
    assert branch_words.verdict(fault).summary == "ranks wait if a.py:1 is true"


def test_a_rank_that_decides_alone_is_named() -> None:
    alone = Alone(3, TRUE, checked("missing", "ranks wait for rank 3"))
    (limit,) = branch_words.verdict(explored(choices=(FALSE,), alone=[alone])).missing_evidence
    assert "a.py:1: if rank 3 alone gets true, ranks wait for rank 3" in limit


def test_a_line_where_nothing_asks_is_answered_with_those_that_do() -> None:
    assert "a.py:7" in branch_words.no_such_branch("a.py:8=true", [decision(7)])
