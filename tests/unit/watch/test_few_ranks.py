"""The reporter of a large job asks a few nodes for evidence, or finds that these are not enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from builders import Job, Stay, all_reduce, recv, send

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.fold.alike import counts_for_all, state_key
from commlens.model.ranklog import End, Observation, RankLog
from commlens.watch import few_ranks as module
from commlens.watch.few_ranks import FewRanks, few_ranks
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.remote_evidence import NodeEvidence
from commlens.watch.nodes.states import States

NODES, PER_NODE = 40, 2
SLEEPS = Observation(End.RUNNING, window_s=5.0, proc_state="S", cpu_s=0.0, stack_moved=False)


class Others:
    """The other nodes of a simulated job, which answer at once."""

    def __init__(self, logs: Sequence[RankLog]) -> None:
        self.logs = logs
        self.asked: list[int] = []
        self.dumb: set[int] = set()  # answer nothing
        self.slow: set[int] = set()  # do not tell states in time
        self.others = [
            Beat(slot, f"n{slot}", [slot * PER_NODE, slot * PER_NODE + 1])
            for slot in range(1, NODES)
        ]

    def gather_states(self, own: States) -> States:
        states = States(dict(own.by_key), own.alone, poses=dict(own.poses))
        for beat in self.others:
            if beat.slot not in self.dumb | self.slow:
                states.add(self.states(beat.slot))
        return states

    def states(self, slot: int) -> States:
        found = States({})
        for log in self.logs[slot * PER_NODE : (slot + 1) * PER_NODE]:
            key = state_key(log)
            found.add(States({key: 1 << log.rank}) if key else States({}, 1 << log.rank))
            found.add(States(poses={b"still": 1 << log.rank}))
        return found

    def gather(self, read: object, *, of: list[int], records: int) -> Any:
        self.asked += of
        assert records >= 64
        return {
            slot: NodeEvidence(
                f"n{slot}", logs=list(self.logs[slot * PER_NODE : (slot + 1) * PER_NODE])
            )
            for slot in of
            if slot not in self.dumb
        }, [beat for beat in self.others if beat.slot in self.dumb.intersection(of)]

    def evidence(self) -> FewRanks | None:
        here = self.logs[:PER_NODE]
        return few_ranks(self, self.states(0), lambda: here)  # type: ignore[arg-type]


def stays(job: Job, rank: int) -> Iterator[object]:
    for _ in range(3):
        yield all_reduce(job.world, 8, line=10)
    if rank == 51:
        yield Stay(57, "load_batch", SLEEPS)
    yield all_reduce(job.world, 8, line=10)


def run(program: Any) -> list[RankLog]:
    logs = Job(NODES * PER_NODE).run(program).logs()
    for log in logs:
        log.host = f"n{log.rank // PER_NODE}"
    return logs


def test_the_culprits_node_and_some_that_wait_are_asked() -> None:
    others = Others(run(stays))
    few = others.evidence()
    assert few is not None
    assert sorted(others.asked) == [1, 25, 39], "four ranks of those that wait, and rank 51"
    assert [log.rank for log in few.logs] == [0, 1, 2, 3, 50, 51, 78, 79]
    verdict = diagnose_logs(few.logs, alike=few.alike)
    assert counts_for_all(verdict, few.alike)
    assert verdict.culprits == [51]
    assert few.poses == {b"still": (1 << NODES * PER_NODE) - 1}
    assert verdict.victims == [rank for rank in range(NODES * PER_NODE) if rank != 51]


def test_waits_are_followed_from_node_to_node() -> None:
    """Half of the ranks wait for messages, each from the rank before it."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank == 40:
            yield Stay(57, "load_batch", SLEEPS)
        if 40 < rank < 44:
            yield recv(job.world, rank - 1, line=20)
        if 40 <= rank < 43:
            yield send(job.world, rank + 1, line=21)
        yield all_reduce(job.world, 8, line=11)

    others = Others(run(program))
    few = others.evidence()
    assert few is not None
    assert {40, 41, 42, 43} <= {log.rank for log in few.logs}
    verdict = diagnose_logs(few.logs, alike=few.alike)
    assert verdict.culprits == [40] and counts_for_all(verdict, few.alike)


def test_a_node_that_does_not_answer_is_told() -> None:
    others = Others(run(stays))
    others.dumb = {7}
    few = others.evidence()
    assert few is not None
    assert [beat.slot for beat in few.silent] == [7]
    (missing,) = diagnose_logs(few.logs, alike=few.alike).missing_evidence
    assert missing.startswith("There are no records of ranks 14-15 of 80,")


def test_a_node_that_was_too_slow_to_tell_states_is_asked_for_records() -> None:
    others = Others(run(stays))
    others.slow = {7, 25}
    few = others.evidence()
    assert few is not None and few.silent == []
    assert {14, 15, 50, 51} <= {log.rank for log in few.logs}
    verdict = diagnose_logs(few.logs, alike=few.alike)
    assert counts_for_all(verdict, few.alike)
    assert (verdict.culprits, verdict.missing_evidence) == ([51], [])


@pytest.mark.parametrize("dumb", [set(), set(range(3, 23))])
def test_all_ranks_are_needed_if_the_states_are_not_known(dumb: set[int]) -> None:
    others = Others(run(stays))
    others.dumb = dumb
    others.gather_states = lambda own: None if not dumb else own  # type: ignore[method-assign]
    assert others.evidence() is None


def test_nothing_is_read_if_the_states_of_too_many_nodes_are_not_known() -> None:
    others = Others(run(stays))
    others.dumb = set(range(3, 23))
    read = []
    assert few_ranks(others, others.states(0), lambda: read.append("here") or []) is None  # type: ignore[arg-type, func-returns-value]
    assert read == []


def test_all_ranks_are_needed_if_each_is_in_a_state_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "NODES_MAX", 20)

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(rank):
            yield all_reduce(job.group(f"own{rank}", [rank]), 8, line=10)
        yield Stay(57, "load_batch", SLEEPS)

    assert Others(run(program)).evidence() is None


def test_a_job_that_moves_on_is_not_looked_at_rank_by_rank() -> None:
    others = Others(run(stays))
    gather = others.gather

    def gather_later(read: object, *, of: list[int], records: int) -> Any:
        found, silent = gather(read, of=of, records=records)
        for node in found.values():
            for log in node.logs:
                log.collectives[-1].index += 1
                log.issued += 1
        return found, silent

    others.gather = gather_later  # type: ignore[method-assign]
    assert others.evidence() is None
