"""What the node that reports prints on which nodes, and what each node saves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from boxes import busy_box
from builders import Job, Stay, all_reduce

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import OpenBox
from commlens.config import Settings
from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.fold.alike import Alike, AlikeRanks
from commlens.dumps.read import read_evidence
from commlens.dumps.save import SavedRank, add_node, save_dump
from commlens.model.ranklog import Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.model.worlds import JobWorld, Worlds
from commlens.watch.evidence import Collected
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.known_nodes import Lost
from commlens.watch.reporting import Reporter


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
            [theirs], Settings(dump_dir=str(tmp_path / "dumps")), evidence, say=said.append
        )  # type: ignore[arg-type]
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
    reporter = Reporter([tmp_path], Settings(), evidence, say=said.append)  # type: ignore[arg-type]
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
    reporter = Reporter([tmp_path], Settings(), evidence, say=lambda _: None)  # type: ignore[arg-type]
    verdict = Verdict(
        kind="mismatch", why="", confidence="high", summary="rank 3 differs", explanation=""
    )
    several = Worlds((JobWorld("trainer", 0, 2), JobWorld("engine", 2, 2)))
    reporter.examined.logs = [RankLog(0, 4, worlds=several if joined else Worlds())]
    verdict.worlds = several if named else Worlds()
    reporter.report(verdict)
    assert told == ["Rank 3 differs."] * is_told


class FewOrAll:
    """The evidence of a job of which some ranks wait like others."""

    def __init__(self, logs: list[RankLog], few: list[int], classes: list[Alike]) -> None:
        self.vanished: list[Lost] = []
        self.lost: list[Lost] = []
        self.read: list[str] = []
        self._logs, self._few, self._classes = logs, few, classes

    def collect_few(self) -> Collected:
        self.read.append("few")
        logs = [self._logs[rank] for rank in self._few]
        return self._lacking_nodes(Collected(logs, alike=AlikeRanks(self._classes)))

    def collect(self) -> Collected:
        self.read.append("all")
        return self._lacking_nodes(Collected(self._logs))

    def _lacking_nodes(self, found: Collected) -> Collected:
        found.lost, found.vanished = self.lost, self.vanished
        return found


def few_or_all(stay: set[int], few: list[int]) -> FewOrAll:
    """Return the evidence of eight ranks, of which some stay away from a collective, and a few are
    examined.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 8, line=10)
        if rank in stay:
            yield Stay(57, "load_batch")
        yield all_reduce(job.world, 8, line=10)

    classes = [
        Alike(frozenset(ranks & set(few)), frozenset(ranks - set(few)))
        for ranks in (stay, set(range(8)) - stay)
    ]
    return FewOrAll(Job(8).run(program).logs(), few, classes)


@pytest.mark.parametrize("vanished", [False, True])
def test_all_ranks_are_read_where_the_awaited_one_is_on_a_node_that_is_lost(
    tmp_path: Path, vanished: bool
) -> None:
    evidence = few_or_all({3}, [0, 1, 3])
    evidence.lost = [Lost(Beat(1, "b", [3], world_size=8), 6.0, True)]
    evidence.vanished = evidence.lost if vanished else []
    reporter = Reporter([tmp_path], Settings(), evidence, diagnose=diagnose_logs)  # type: ignore[arg-type]
    reporter.diagnose(stands_still=True)
    assert evidence.read == ["few", "all"]


@pytest.mark.parametrize(
    ("stay", "few", "stands_still", "read"),
    [
        pytest.param({3}, [0, 1, 3], True, ["few"], id="the-one-awaited-was-examined"),
        pytest.param({1, 3}, [0, 1], True, ["few", "all"], id="it-stands-for-another"),
        pytest.param({3}, [0, 1, 3], False, ["all"], id="the-job-ends"),
    ],
)
def test_all_ranks_are_read_where_a_few_do_not_tell_what_is_wrong_with_all(
    tmp_path: Path, stay: set[int], few: list[int], stands_still: bool, read: list[str]
) -> None:
    evidence = few_or_all(stay, few)
    reporter = Reporter([tmp_path], Settings(), evidence, diagnose=diagnose_logs)  # type: ignore[arg-type]
    verdict = reporter.diagnose(stands_still=stands_still)
    assert evidence.read == read
    assert verdict.culprits == sorted(stay)
    assert verdict.victims == sorted(set(range(8)) - stay)
