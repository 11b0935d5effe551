"""What the node that reports prints on which nodes, and what each node saves."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from boxes import busy_box

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import OpenBox
from commlens.config import Settings
from commlens.dumps.read import read_evidence
from commlens.dumps.save import SavedRank, add_node, save_dump
from commlens.model.ranklog import Observation, RankLog
from commlens.model.verdict import Action, Verdict
from commlens.model.worlds import JobWorld, Worlds
from commlens.watch import reporting
from commlens.watch.diagnoser import Diagnoser
from commlens.watch.nodes.beat import Beat
from commlens.watch.reporting import FormerAttempts, Reporter


def test_a_node_saves_what_the_dump_of_the_node_that_reports_lacks(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "box0" / "job-1", tmp_path / "box1" / "job-1"
    for rank, folder in ((0, ours), (1, theirs)):
        busy_box(rank, 2, pid=100 + rank).write(folder)
    dump = save_dump(ours, tmp_path / "dumps", {}, host="n0", keep=3)
    box = OpenBox(job_dirs.boxes(theirs)[0])
    said: list[str] = []
    nodes = SimpleNamespace(dump=str(dump), update=lambda **_: None)
    evidence = SimpleNamespace(nodes=nodes, observations=dict, remote={}, health_here=lambda: None)

    def save_own(newest: int | None) -> str:
        add_node(
            dump,
            [SavedRank(1, 101, Observation(), box.packed(newest=newest), 1)],
            host=os.uname().nodename,
            job="job-1",
        )
        reporter = Reporter(
            [theirs],
            Settings(dump_dir=str(tmp_path / "dumps")),
            Diagnoser(evidence, Settings()),  # type: ignore[arg-type]
            say=said.append,
        )
        reporter.save_own_dump()
        return said.pop()

    assert save_own(4) == f"dump saved in {dump}; read it with `commlens diagnose {dump}`", (
        "all records, in the folder that both share"
    )
    assert [len(log.collectives) for log in read_evidence(dump).logs] == [10, 10]
    assert save_own(None) == f"the dump of all nodes is in {dump}"
    assert said == []


def test_a_slow_rank_is_told_on_all_nodes(tmp_path: Path) -> None:
    """Its own node's watcher finds it, whichever node reports for the job."""
    said: list[str | Verdict] = []
    announced: list[str] = []
    reports = Beat(0, "n00", [0, 1])
    evidence = SimpleNamespace(nodes=SimpleNamespace(reporter=reports, announce=announced.append))
    diagnoser = Diagnoser(evidence, Settings())  # type: ignore[arg-type]
    reporter = Reporter([tmp_path], Settings(), diagnoser, say=said.append)
    verdict = Verdict(
        kind="straggler",
        why="user-code",
        confidence="medium",
        summary="rank 3 makes the job slow",
        explanation="It sleeps.",
    )
    reporter.report_slow(verdict)
    reporter.say_on_all_nodes("rank 3 no longer makes the job slow.")
    assert said[0] == "Rank 3 makes the job slow. It sleeps."
    assert announced == [
        f"Rank 3 makes the job slow. It sleeps. (found on {os.uname().nodename})",
        "rank 3 no longer makes the job slow.",
    ]


@pytest.mark.parametrize(
    ("joined", "named", "is_told"),
    [
        pytest.param(True, False, False, id="of-this-world-alone"),
        pytest.param(True, True, True, id="of-several"),
        pytest.param(False, False, True, id="of-one-world-on-two-nodes"),
    ],
)
def test_other_worlds_are_told_only_what_is_said_of_them(
    tmp_path: Path, joined: bool, named: bool, is_told: bool
) -> None:
    told: list[str] = []
    evidence = SimpleNamespace(
        nodes=SimpleNamespace(reporter=None, announce=lambda *_, **__: None),
        worlds=SimpleNamespace(announce=lambda line, *_, **__: told.append(line)),
    )
    diagnoser = Diagnoser(evidence, Settings())  # type: ignore[arg-type]
    reporter = Reporter([tmp_path], Settings(), diagnoser, say=lambda _: None)
    verdict = Verdict(
        kind="mismatch", why="", confidence="high", summary="rank 3 differs", explanation=""
    )
    several = Worlds((JobWorld("trainer", 0, 2), JobWorld("engine", 2, 2)))
    diagnoser.examined.logs = [RankLog(0, 4, worlds=several if joined else Worlds())]
    verdict.worlds = several if named else Worlds()
    reporter.report(verdict)
    assert told == ["Rank 3 differs."] * is_told


def fault() -> Verdict:
    """Return a verdict on a rank that was killed, without a known reason."""
    action = Action(do="restart", because="killed", confidence="medium")
    return Verdict(
        kind="dead",
        why="signal",
        root_cause=True,
        culprits=[1],
        source="train.py:12",
        action=action,
    )


@pytest.mark.parametrize("is_same", [True, False])
def test_a_fault_of_the_former_workers_that_comes_back_is_counted(
    tmp_path: Path, is_same: bool
) -> None:
    attempts = FormerAttempts([tmp_path], "")
    attempts.begin_next(fault() if is_same else None)
    again = fault()
    attempts.decide_action(again)
    assert again.action is not None and again.action.attempts == (2 if is_same else 1)


def test_what_cannot_be_decided_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = FormerAttempts([tmp_path], str(tmp_path))

    def fail(*_: object) -> None:
        raise OSError("the file server does not answer")

    monkeypatch.setattr(reporting.save, "earlier_verdicts", fail)
    verdict = fault()
    attempts.decide_action(verdict)
    assert verdict.action == fault().action
