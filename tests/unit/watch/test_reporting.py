"""What the node that reports asks the others for, of many nodes only the newest records of most
ranks; and what each node saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from boxes import busy_box
from builders import Die, Job, Stay, Step, all_reduce, collective

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import OpenBox
from commlens.config import Settings
from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.fold.alike import NONE_ALIKE, Alike, AlikeRanks
from commlens.dumps.read import read_evidence
from commlens.dumps.save import SavedRank, add_node, save_dump
from commlens.model.collective import (
    SETUP,
    Channel,
    Collective,
    CollectiveArgs,
    HandMade,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.model.worlds import JobWorld, Worlds
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.known_nodes import Lost
from commlens.watch.nodes.remote_evidence import first_records_of_each
from commlens.watch.other_worlds import reading_of
from commlens.watch.reporting import Evidence, Reporter, nodes_to_ask

RANKS, PER_NODE, STEPS = 16, 4, 100
KILLED = Die(Observation(End.KILLED, None, "SIGKILL"))
NODES = [
    Beat(slot, f"n{slot}", list(range(slot * PER_NODE, (slot + 1) * PER_NODE)))
    for slot in range(RANKS // PER_NODE)
]


def simulate(fault: Callable[[Job, int], list[object]]) -> list[RankLog]:
    """Run data parallel groups of four, with a collective of all ranks every fifth step; rank 13
    leaves the routine near the end.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        mine = next(group for group in groups if rank in group.ranks)
        for step in range(STEPS):
            if rank == 13 and step == STEPS - 2:
                yield from fault(job, rank)
            yield collective("all_gather", mine, 10, line=10)
            yield all_reduce(mine, 100, line=20)
            if step % 5 == 0:
                yield all_reduce(job.world, 4, line=30)
            yield Step()

    job = Job(RANKS)
    groups = [job.group(f"dp{first}", range(first, RANKS, 4)) for first in range(4)]
    return job.run(program).logs(after_s=60)


def told(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(verdict, looked_at="")


@pytest.mark.parametrize("world_size", [100, 10_000])
@pytest.mark.parametrize(
    "fault",
    [
        lambda job, rank: [Stay(57, "load_batch")],
        lambda job, rank: [KILLED],
        lambda job, rank: [all_reduce(job.world, 4, line=44)],  # an extra one
        lambda job, rank: [collective("all_gather", job.world, 9, line=45)],
    ],
    ids=["data-loader", "killed", "extra", "another-group"],
)
def test_the_verdict_is_that_of_all_records(
    fault: Callable[[Job, int], list[object]], world_size: int
) -> None:
    logs = simulate(fault)
    first = first_records_of_each(world_size)
    heads = [msgspec.structs.replace(log, collectives=log.collectives[-first:]) for log in logs]
    everything = diagnose_logs(logs)
    assert everything.culprits == [13]
    asked = nodes_to_ask(diagnose_logs(heads), NODES[1:])
    assert not asked or 3 in asked, "the culprit's node"
    read = [
        (
            logs[rank]
            if rank // PER_NODE == 0 or not asked or rank // PER_NODE in asked
            else heads[rank]
        )
        for rank in range(RANKS)
    ]
    assert told(diagnose_logs(read)) == told(everything)


def test_few_nodes_are_asked_for_all_records() -> None:
    verdict = diagnose_logs(simulate(lambda job, rank: [Stay(57, "load_batch")]))
    many = [Beat(slot, f"n{slot}", [100 + slot]) for slot in range(4, 100)]
    assert nodes_to_ask(verdict, [*NODES[1:], *many]) == [1, 2, 3], (
        "the culprit's node, and those of some that wait"
    )
    moved = msgspec.structs.replace(
        verdict,
        culprits=[n + 50 for n in verdict.culprits],
        victims=[n + 50 for n in verdict.victims],
    )
    assert nodes_to_ask(moved, [*NODES[1:], *many], 50) == [1, 2, 3], "of the second world"
    assert nodes_to_ask(msgspec.structs.replace(verdict, confidence="low"), NODES) == [], "all"
    assert (
        nodes_to_ask(msgspec.structs.replace(verdict, kind="stuck-inside", culprits=[]), NODES)
        == []
    ), "all"


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
    reporter.tell_all_nodes("rank 3 no longer makes the job slow.")
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
    reporter.logs = [RankLog(0, 4, worlds=several if joined else Worlds())]
    verdict.worlds = several if named else Worlds()
    reporter.report(verdict)
    assert told == ["Rank 3 differs."] * is_told


def evidence_with(elsewhere: list[list[RankLog]], folder: Path) -> Evidence:
    nodes = SimpleNamespace(reporter=None, lost=lambda _: [])
    worlds = SimpleNamespace(
        gather=lambda: (elsewhere, []), note_joined=lambda _: None, out_of_sight=set()
    )
    roster = SimpleNamespace(folders=[folder / "none" / "job"])
    return Evidence(roster, None, nodes, worlds, None, launched=False)  # type: ignore[arg-type]


def test_ranks_of_containers_with_the_same_host_and_pids_keep_their_numbers(tmp_path: Path) -> None:
    logs = [
        RankLog(rank, 4, "job", "box", 100 + rank % 2, captured_ns=10**18 + rank)
        for rank in range(4)
    ]
    evidence = evidence_with([], tmp_path)
    assert [log.rank for log in evidence._joined(logs, [])[0]] == [0, 1, 2, 3]
    assert evidence.first == 0
    server = [
        RankLog(rank, 2, "server", "box", 100 + rank, captured_ns=10**18 + 8 + rank)
        for rank in range(2)
    ]
    for member, log in ((0, logs[0]), (1, server[0])):
        group = ProcessGroup("", (), hand_made=HandMade(member, 2, "n03:1/weights"))
        args = CollectiveArgs("new_group", "new_group")
        log.setups = [Collective(0, Channel(group, SETUP), 1, args, State.COMPLETED, 1, 1)]
    for log in logs:
        log.script = "trainer.py"
    for log in server:
        log.script = "server.py"
    evidence = evidence_with([server], tmp_path)
    assert sorted(log.rank for log in evidence._joined(logs, [])[0]) == [0, 1, 2, 3, 4, 5]
    assert evidence.first == 2, "the server's ranks come first"
    # of a world whose meeting place ended, only the names are known
    evidence.worlds.out_of_sight = {reading_of(log) for log in server}
    joined = evidence._joined(logs, [])[0]
    assert sorted(log.rank for log in joined) == [2, 3, 4, 5]
    assert len(joined[0].worlds.worlds) == 2


class FewOrAll:
    """The evidence of a job of which some ranks wait like others."""

    def __init__(self, logs: list[RankLog], few: list[int], classes: list[Alike]) -> None:
        self.alike = NONE_ALIKE
        self.first = 0
        self.vanished: list[object] = []
        self.lost: list[object] = []
        self.lacks_records = False
        self.read: list[str] = []
        self._logs, self._few, self._classes = logs, few, classes

    def logs_of_few(self) -> tuple[list[RankLog], list[str]]:
        self.read.append("few")
        self.alike = AlikeRanks(self._classes)
        return [self._logs[rank] for rank in self._few], []

    def logs(self) -> tuple[list[RankLog], list[str]]:
        self.read.append("all")
        self.alike = NONE_ALIKE
        return self._logs, []


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
