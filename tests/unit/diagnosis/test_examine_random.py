"""Random programs: legal ones are healthy, and of one injected fault the rank that has it is named,
and nobody else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from builders import Job, Stay, Step, Wait, collective
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import SLOW, STEPS, Item, applies, broken, one_step, sizes, steps, with_fault
from two_sides import tell_sides_apart
from verdict_schema import hold_to_schema

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.reports.terminal import render

WAITS_FOR_ITSELF = re.compile(r"rank (\d+) waits[^;.]*for rank \1\b")


def judge(logs: list[RankLog], seed: int) -> Verdict:
    verdict = diagnose_logs(logs)
    hold_to_schema(verdict)
    assert tell_sides_apart(verdict)
    shuffled = list(logs)
    random.Random(seed).shuffle(shuffled)
    assert diagnose_logs(shuffled) == verdict
    assert not WAITS_FOR_ITSELF.search(render(verdict, width=10_000))
    return verdict


@SLOW
@given(sizes, steps(), st.integers(0, 1 << 30))
def test_legal_programs_are_healthy(size: int, items: tuple[Item, ...], seed: int) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(STEPS):
            yield from one_step(job, rank, items)

    assert judge(Job(size).run(program).logs(), seed).kind == "healthy"


@SLOW
@given(sizes, steps(), st.integers(0, 60), st.integers(0, 1 << 30))
def test_legal_programs_are_healthy_at_any_moment(
    size: int, items: tuple[Item, ...], moment: int, seed: int
) -> None:
    """Stopped at a random place and looked at at once: nothing has been waited for long."""

    def program(job: Job, rank: int) -> Iterator[object]:
        done = 0
        for _ in range(STEPS):
            for action in one_step(job, rank, items):
                done += 1
                if done > moment + rank % 2:
                    yield Stay(5, "forward", Observation(End.RUNNING))
                yield action

    assert judge(Job(size).run(program).logs(after_s=0.1), seed).kind == "healthy"


FAULTS = ["sleep", "die", "skip", "size", "dtype", "op", "root", "reduce_op", "swap"]


@settings(SLOW, max_examples=examples(150))
@given(st.sampled_from(FAULTS), sizes, steps(plain=True), st.data(), st.integers(0, 1 << 30))
def test_the_rank_with_the_fault_is_named(
    fault: str, size: int, items: tuple[Item, ...], data: st.DataObject, seed: int
) -> None:
    culprit = data.draw(st.integers(0, size - 1), label="culprit")
    applicable = [i for i, item in enumerate(items) if applies(fault, item, items, i, size)]
    if not applicable:
        return
    place = data.draw(st.sampled_from(applicable), label="place")

    verdict = judge(Job(size).run(with_fault(items, fault, place, culprit)).logs(), seed)
    roots = [finding for finding in verdict.findings if finding.root_cause]
    assert [finding.culprits for finding in roots] == [[culprit]], (
        fault,
        [(f.kind, f.why, f.culprits, f.summary) for f in verdict.findings],
    )
    expected = {
        "sleep": {"missing"},
        "die": {"dead"},
        "size": {"mismatch/shape"},
        "dtype": {"mismatch/dtype"},
        "op": {"mismatch/op"},
        "root": {"mismatch/root"},
        "reduce_op": {"mismatch/reduce-op"},
        "swap": {"cycle"},
    }
    if fault in expected:
        assert verdict.kind in expected[fault]


def test_of_two_ranks_the_one_that_skipped_is_named_though_its_next_collective_pairs_up_unnoticed():
    items = (
        Item("all_reduce", "world", 4, 10),
        Item("all_reduce", "world", 4, 11),
        Item("all_reduce", "world", 100, 99),
    )
    verdict = judge(Job(2).run(with_fault(items, "skip", 0, culprit=1)).logs(), 0)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("mismatch/shape", [1], [0])
    assert "rank 1" in verdict.summary


# --- two halves that never agreed

TIES = ["skip", "size", "dtype", "op", "reduce_op", "swap"]


@settings(SLOW, max_examples=examples(200))
@given(
    st.sampled_from(TIES),
    sizes,
    steps(plain=True),
    st.sampled_from(["high", "odd", "node"]),
    st.integers(1, 2),
    st.data(),
)
def test_of_two_halves_that_never_agreed_nobody_is_named(
    fault: str, size: int, items: tuple[Item, ...], side: str, steps_done: int, data: st.DataObject
) -> None:
    applicable = [i for i, item in enumerate(items[:-1]) if applies(fault, item, items, i, size)]
    if not applicable:
        return
    place = data.draw(st.sampled_from(applicable), label="place")
    odd = {rank for rank in range(size) if (rank % 2 if side == "odd" else rank >= size // 2)}

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(steps_done):
            yield from (
                broken(job, rank, items, fault, place)
                if rank in odd
                else one_step(job, rank, items)
            )

    logs = Job(size).run(program).logs()
    for log in logs:
        log.host = "n04" if side == "node" and log.rank in odd else "n03"
    verdict = judge(logs, 0)
    roots = [
        finding for finding in verdict.findings if finding.root_cause and finding.why != "finished"
    ]
    told = [(f.kind, f.why, f.culprits, f.summary) for f in verdict.findings]
    assert not any(finding.culprits for finding in roots), told
    assert all(finding.confidence == "low" for finding in roots), told
    if side == "node" and roots and roots[0].kind.startswith("mismatch/"):
        assert "The sides follow the hosts" in roots[0].explanation


# --- a mesh on which two ranks swap the order of two groups


@st.composite
def mesh_steps(draw: st.DrawFn) -> tuple[tuple[tuple[str, str, bool], ...], int]:
    """The step of a TP x FSDP mesh (op, group, asynchronous), and the place of two neighbours of
    different groups.
    """
    layers = draw(st.integers(1, 3))
    asynchronous = st.booleans()
    items = []
    for _ in range(layers):
        items += [("all_gather", "fsdp", draw(asynchronous)), ("all_reduce", "tp", False)]
    for _ in range(layers):
        items += [
            ("reduce_scatter", "fsdp", draw(asynchronous)),
            *([("all_gather", "tp", False)] if draw(st.booleans()) else []),
        ]
    items += [
        ("all_reduce", name, draw(asynchronous))
        for name in ("flat", "world")
        if draw(st.booleans())
    ]
    items.append(("all_reduce", "world", False))
    places = [i for i in range(len(items) - 1) if items[i][1] != items[i + 1][1]]
    return tuple(items), draw(st.sampled_from(places))


@SLOW
@given(
    st.sampled_from([(8, 2), (16, 2), (16, 4), (32, 4), (64, 8)]),
    mesh_steps(),
    st.sampled_from([0, 1, 3]),
    st.data(),
)
def test_only_ranks_that_swap_two_groups_are_named(
    mesh: tuple[int, int],
    step: tuple[tuple[tuple[str, str, bool], ...], int],
    fault_step: int,
    data: st.DataObject,
) -> None:
    (size, tp), (items, place) = mesh, step
    odd = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=2), label="odd"))

    def program(job: Job, rank: int) -> Iterator[object]:
        of = {
            "tp": job.group(f"t{rank // tp}", range(rank // tp * tp, rank // tp * tp + tp), "tp"),
            "fsdp": job.group(f"d{rank % tp}", range(rank % tp, size, tp), "fsdp"),
            "flat": job.group("f", range(size), "flat"),
            "world": job.world,
        }
        for number in range(5):
            order = list(range(len(items)))
            if rank in odd and number == fault_step:
                order[place], order[place + 1] = order[place + 1], order[place]
            pending: list[str] = []
            for i in order:
                op, group, is_async = items[i]
                if len(pending) > 1:
                    yield Wait(pending.pop(0))
                reduce_op = "SUM" if "reduce" in op else None
                yield collective(
                    op,
                    of[group],
                    64,
                    line=30 + i,
                    is_async=is_async,
                    handle=str(i),
                    reduce_op=reduce_op,
                )
                pending += [str(i)] * is_async
            yield from map(Wait, pending)
            yield Step()

    job = Job(size).run(program)
    verdict = judge(job.logs(), 0)
    roots = {
        rank for finding in verdict.findings if finding.root_cause for rank in finding.culprits
    }
    assert verdict.is_fault == any(not one.over for one in job.ranks)
    assert roots <= set(odd), verdict.summary
    assert roots or not verdict.is_fault or (fault_step == 0 and size == 8), verdict.summary
