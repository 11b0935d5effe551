"""Tests of src/commlens/check/explore.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from commlens.check import explore as module
from commlens.check.branches import Branch, BranchLine, Choice
from commlens.check.explore import Choices, Explored, explore
from commlens.check.judge import Checked
from commlens.check.schedule import Outcome, RankState
from commlens.check.sequence import RankSequence
from commlens.diagnosis.examine import ExaminedJob
from commlens.model.cause import LatentFault
from commlens.model.collective import Frame
from commlens.model.verdict import Finding, Verdict

FIRST, SECOND = Branch("a.py", 1, (False, True)), Branch("a.py", 2, (False, True))
UNUSED: Any = None


def checked(verdict: Verdict, sequences: Mapping[int, RankSequence]) -> Checked:
    states = {rank: RankState(sequence) for rank, sequence in sequences.items()}
    job = ExaminedJob(verdict, UNUSED, UNUSED, UNUSED)
    return Checked(job, Outcome(states, [], [], 0))


def explored(
    *faults: set[int],
    branches: tuple[Branch, ...] = (FIRST, SECOND),
    alike: bool = True,
) -> Explored:
    """Explore a program of two ranks whose steps are the lines that are true. It is wrong if a rank
    has one of these sets of lines, or if ranks have different ones.
    """

    def run(choices: Choices) -> Checked:
        decisions = [
            BranchLine(Frame("/a.py", each.line, "f"), "truth", alike, (each.value,), forced=True)
            for each in choices
        ]
        lines = sum(each.line for each in choices if each.value)
        sequences = {
            rank: RankSequence(rank, 2, steps=lines, decisions=decisions) for rank in (0, 1)
        }
        return judge(sequences)

    def judge(sequences: Mapping[int, RankSequence]) -> Checked:
        lines = {each.steps for each in sequences.values()}
        wrong = len(lines) > 1 or any(lines == {sum(fault)} for fault in faults)
        verdict = Verdict(kind="cycle" if wrong else "healthy", summary=f"{lines}")
        return checked(verdict, sequences)

    return explore(run, judge, branches)


def test_without_branches_a_program_runs_once() -> None:
    found = explored(branches=())
    assert found.tried == [()]
    assert found.combinations == 1
    assert not found.checked.verdict.is_fault


def test_the_worst_run_is_returned_with_its_answers() -> None:
    found = explored({1, 2})
    assert found.checked.verdict.kind == "cycle"
    assert found.choices == (Choice("a.py", 1, True), Choice("a.py", 2, True))
    assert len(found.tried) == found.combinations == 4


def test_answers_that_change_nothing_are_left_out() -> None:
    assert explored({1, 2}).deciding == (Choice("a.py", 1, True), Choice("a.py", 2, True))
    idle = Branch("a.py", 0, (False, True))
    assert explored({1}, branches=(idle, FIRST)).deciding == (Choice("a.py", 1, True),)
    assert explored({1}, branches=(FIRST, idle)).deciding == (Choice("a.py", 1, True),)
    assert explored({0}, branches=(idle,)).deciding == (), "it fails with all answers"


def test_a_bound_cuts_the_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRIED_MAX", 3)
    idle = Branch("a.py", 0, (False, True))
    assert len(explored({1}, branches=(FIRST, idle)).deciding) == 2, "not all were tried"
    found = explored({1, 2})
    assert not found.checked.verdict.is_fault
    assert (len(found.tried), found.combinations) == (3, 4)


def test_a_rank_may_decide_alone_where_values_are_its_own() -> None:
    assert explored().alone == []
    found = explored(alike=False).alone
    assert [(each.rank, each.choice) for each in found] == [
        (1, Choice("a.py", 1, True)),
        (1, Choice("a.py", 2, True)),
    ]


def test_decisions_of_all_runs_are_merged() -> None:
    assert [each.taken for each in explored().decisions] == [(False, True)] * 2


def test_latent_faults_of_all_runs_are_returned_once_with_their_answers() -> None:
    def run(choices: Choices) -> Checked:
        lines = [each.line for each in choices if each.value] + [9]
        findings = [latent(f"a.py:{line}") for line in lines]
        verdict = Verdict(kind="healthy", summary="", findings=findings)
        return checked(verdict, {})

    found = explore(run, UNUSED, (FIRST, SECOND))
    assert [(each.finding.source, each.choices) for each in found.latent] == [
        ("a.py:1", (Choice("a.py", 1, True), Choice("a.py", 2, False))),
        ("a.py:2", (Choice("a.py", 1, False), Choice("a.py", 2, True))),
    ]


def latent(source: str) -> Finding:
    both: dict[str, Any] = {"kind": "hazard", "why": "program", "root_cause": True}
    both |= {"culprits": [0], "victims": [], "confidence": "high", "source": source}
    cause = LatentFault(what="never-waited", op="all_reduce", times=1, blamed_by=None, **both)
    return Finding(summary="", cause=cause, **both)
