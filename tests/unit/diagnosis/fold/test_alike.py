"""Verdicts on a few ranks of each state say what verdicts on all ranks say, or do not count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pytest
import starting_ranks
from builders import START, Die, Job, S, Stay, Step, all_reduce
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import SLOW, Item, applies, with_fault
from random_steps import steps as random_steps
from starting_ranks import groups, init
from starting_ranks import rank as starting_rank
from verdict_schema import hold_to_schema

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.fold.alike import (
    Alike,
    AlikeRanks,
    awaited_others,
    counts_for_all,
    ranks_to_examine,
    standing_for_others,
    state_key,
)
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Finding, Verdict

NODE = 4
SIZE = 96
SLEEPS = Observation(End.RUNNING, window_s=5.0, proc_state="S", cpu_s=0.0, stack_moved=False)
Program = Callable[[Job, int], Iterator[object]]


class Folded(NamedTuple):
    """The verdict on all ranks, and the one on some of them."""

    full: Verdict
    some: Verdict
    alike: AlikeRanks
    examined: list[RankLog]

    @property
    def counts(self) -> bool:
        return counts_for_all(self.some, self.alike)


def fold(logs: Sequence[RankLog]) -> Folded:
    """Examine the ranks of the nodes that the reporter would ask."""
    by_key: dict[object, set[int]] = defaultdict(set)
    for log in logs:
        by_key[state_key(log) or log.rank].add(log.rank)
    nodes: set[int] = set()
    more = ranks_to_examine(by_key.values())
    while more:
        nodes |= {rank // NODE for rank in more}
        examined = [log for log in logs if log.rank // NODE in nodes]
        here = {log.rank for log in examined}
        alike = AlikeRanks(
            Alike(frozenset(ranks & here), frozenset(ranks - here)) for ranks in by_key.values()
        )
        more = awaited_others(examined, alike)
    alike = standing_for_others(examined, alike)
    some = diagnose_logs(examined, alike=alike)
    hold_to_schema(some)
    return Folded(diagnose_logs(logs), some, alike, examined)


def run(program: Program, size: int = SIZE) -> list[RankLog]:
    logs = Job(size).run(program).logs()
    for log in logs:
        log.host, log.local_rank = f"n{log.rank // NODE}", log.rank % NODE
    return logs


def mesh(job: Job, rank: int) -> tuple[object, object]:
    """Return the rank's groups: of its node, and of the ranks in its place on all nodes."""
    node, place = divmod(rank, NODE)
    tensor = job.group(f"tp{node}", range(node * NODE, (node + 1) * NODE), "tp")
    data = job.group(f"dp{place}", range(place, job.size, NODE), "dp")
    return tensor, data


def steps(fault: Callable[[Job, int, int], Iterator[object] | None], *, alone: bool) -> Program:
    """Train with one group of all ranks, or with tensor and data parallelism."""

    def program(job: Job, rank: int) -> Iterator[object]:
        tensor, data = (None, job.world) if alone else mesh(job, rank)
        for number in range(6):
            if tensor is not None:
                yield all_reduce(tensor, 16, line=10)
            replaced = fault(job, rank, number)
            yield from [all_reduce(data, 100, line=20)] if replaced is None else replaced
            yield Step()

    return program


def only(rank: int, *actions: object) -> Callable[[Job, int, int], Iterator[object] | None]:
    return lambda job, one, number: iter(actions) if (one, number) == (rank, 3) else None


def untimed(finding: Finding) -> Finding:
    """Return a finding without the longest wait, which another rank may have."""
    waits = [
        msgspec.structs.replace(wait, waited_s=0.0) for wait in getattr(finding.cause, "waits", [])
    ]
    changed = {"waits": waits} if waits else {}
    return msgspec.structs.replace(finding, cause=msgspec.structs.replace(finding.cause, **changed))


def other_shape(job: Job, rank: int, number: int) -> Iterator[object] | None:
    if (rank, number) != (50, 3):
        return None
    return iter([all_reduce(job.world, 101, line=20)])


STAYS = Stay(57, "load_batch", SLEEPS)
DIES = Die(Observation(End.KILLED, signal="SIGKILL", ended_ns=START + S))


@pytest.mark.parametrize(
    ("program", "kind", "culprits"),
    [
        pytest.param(steps(only(50, STAYS), alone=True), "missing", [50], id="stays"),
        pytest.param(steps(only(50, STAYS), alone=False), "missing", [50], id="stays-in-a-mesh"),
        pytest.param(steps(only(0, STAYS), alone=False), "missing", [0], id="the-first-stays"),
        pytest.param(steps(only(50, DIES), alone=False), "dead", [50], id="dies"),
        pytest.param(steps(other_shape, alone=True), "mismatch/shape", [50], id="other-shape"),
    ],
)
def test_one_rank_of_many_is_found_among_a_few(
    program: Program, kind: str, culprits: list[int]
) -> None:
    found = fold(run(program))
    assert (found.full.kind, found.full.culprits) == (kind, culprits)
    assert found.counts
    assert len(found.examined) < SIZE / 2
    assert found.some.victims == found.full.victims
    assert found.some.group == found.full.group
    assert (found.some.summary, found.some.explanation) == (
        found.full.summary,
        found.full.explanation,
    )
    assert list(map(untimed, found.some.findings)) == list(map(untimed, found.full.findings))
    assert found.some.missing_evidence == found.full.missing_evidence
    assert f"{len(found.alike.others)} more ranks wait like some of these" in found.some.looked_at


def test_nothing_is_said_of_ranks_that_stand_for_others() -> None:
    """Half of the ranks stay away: which of them is to blame is not known by examining some."""

    def half(job: Job, rank: int, number: int) -> Iterator[object] | None:
        if number != 3:
            return None
        if rank % 2:
            return iter([all_reduce(job.world, 100, line=20)])
        return iter([all_reduce(job.world, 100, line=25)])

    def disagrees(job: Job, rank: int, number: int) -> Iterator[object] | None:
        return iter([all_reduce(job.world, 100 + rank % 2, line=20)]) if number == 3 else None

    assert not fold(run(steps(half, alone=True))).counts, "nothing is wrong"
    assert not fold(run(steps(disagrees, alone=True))).counts, "nothing chooses between the sides"


FAULTS = ["sleep", "die", "skip", "size", "dtype", "op", "root", "reduce_op", "swap"]


@settings(SLOW, max_examples=examples(40))
@given(st.sampled_from(FAULTS), random_steps(plain=True), st.integers(0, 31), st.data())
def test_a_verdict_on_a_few_ranks_that_counts_is_that_on_all(
    fault: str, items: tuple[Item, ...], culprit: int, data: st.DataObject
) -> None:
    size = 32
    applicable = [i for i, item in enumerate(items) if applies(fault, item, items, i, size)]
    if not applicable:
        return
    place = data.draw(st.sampled_from(applicable), label="place")
    found = fold(run(with_fault(items, fault, place, culprit), size))
    if found.counts:
        assert found.some.culprits == found.full.culprits
        assert (found.some.kind, found.some.why) == (found.full.kind, found.full.why)
        assert found.some.victims == found.full.victims


def test_groups_that_ranks_make_are_said_with_all_their_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 32
    monkeypatch.setattr(starting_ranks, "WORLD", size)

    def one(number: int) -> RankLog:
        odd = number == 13
        made = groups(range(size - odd))
        log = starting_rank(number, init(), *made, inside=odd, issued="" if odd else "all_reduce")
        log.host = f"n{number // NODE}"
        return log

    found = fold(list(map(one, range(size))))
    assert found.counts and found.alike.others
    assert (found.some.summary, found.some.explanation) == (
        found.full.summary,
        found.full.explanation,
    )
    assert "ranks 0-30" in found.full.summary
