"""What the node that reports asks the others for: of many nodes, only the newest records of most
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from builders import Die, Job, Stay, Step, all_reduce, collective

from commlens.diagnosis.examine import diagnose_logs
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
from commlens.watch.evidence import Collected, Evidence, nodes_to_ask
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.remote_evidence import first_records_of_each
from commlens.watch.other_worlds import reading_of

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


def test_no_node_is_asked_once_all_have_left() -> None:
    verdict = diagnose_logs(simulate(lambda job, rank: [Stay(57, "load_batch")]))
    assert nodes_to_ask(verdict, []) == []


def evidence_with(elsewhere: list[list[RankLog]], folder: Path) -> Evidence:
    nodes = SimpleNamespace(reporter=None, lost=lambda _: [], sentences_on_lost=list)
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
    found = evidence._complete(Collected(logs))
    assert [log.rank for log in found.logs] == [0, 1, 2, 3] and found.first_rank == 0
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
    found = evidence._complete(Collected(logs))
    assert sorted(log.rank for log in found.logs) == [0, 1, 2, 3, 4, 5]
    assert found.first_rank == 2, "the server's ranks come first"
    # of a world whose meeting place ended, only the names are known
    evidence.worlds.out_of_sight = {reading_of(log) for log in server}
    joined = evidence._complete(Collected(logs)).logs
    assert sorted(log.rank for log in joined) == [2, 3, 4, 5]
    assert len(joined[0].worlds.worlds) == 2
