"""Random programs whose records are compared as they appear: legal ones give no report, and an
injected disagreement its culprit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from builders import Job
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from live_boxes import Node, all_reduce
from random_steps import SLOW, STEPS, Item, applies, one_step, sizes, steps, with_fault

from commlens.model.verdict import Verdict

CAPACITIES = st.sampled_from([32, 64, 1024])


def watched(
    job: Job, seed: int, *, capacity: int = 1024, everywhere: bool = True
) -> tuple[Node, list[Verdict]]:
    """Let the job's ranks write their boxes at random paces, and look at them in between."""
    choose = random.Random(seed)
    node = Node(
        job.size if everywhere else max(2, job.size // 2), world_size=job.size, capacity=capacity
    )
    left = [list(job.ranks[rank.rank].log.collectives) for rank in node.ranks]
    said: list[Verdict] = []
    while any(left):
        rank = choose.choice([i for i, ops in enumerate(left) if ops])
        for _ in range(min(len(left[rank]), choose.randint(1, 12))):
            node.ranks[rank].replay(left[rank].pop(0))
        if choose.random() < 0.3:
            node.ranks[rank].beat()
        if choose.random() < 0.5:
            said += node.look(after=0.09)
    return node, said + node.settle()


def lines_by_rank(items: tuple[Item, ...], rank: int, which: int) -> tuple[Item, ...]:
    """The same program where some lines stand in an ``if rank == 0`` or depend on the stage."""
    return tuple(
        replace(item, line=item.line + 100 * (rank % (2 + i % 3))) if which >> i & 1 else item
        for i, item in enumerate(items)
    )


@SLOW
@given(sizes, steps(), st.integers(0, 63), CAPACITIES, st.booleans(), st.integers(0, 1 << 30))
def test_legal_programs_are_not_reported(
    size: int, items: tuple[Item, ...], which: int, capacity: int, everywhere: bool, seed: int
) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(STEPS + seed % 10):
            yield from one_step(job, rank, lines_by_rank(items, rank, which))

    node, said = watched(Job(size).run(program), seed, capacity=capacity, everywhere=everywhere)
    assert said == [], [verdict.summary for verdict in said]
    assert not any(node.verification.comparison.disagreement_counts.values())


@settings(SLOW, max_examples=examples(120))
@given(
    st.sampled_from(["size", "dtype", "op", "root", "reduce_op"]),
    sizes,
    steps(plain=True),
    st.data(),
    st.integers(0, 1 << 30),
)
def test_one_disagreement_is_reported_with_its_culprit(
    fault: str, size: int, items: tuple[Item, ...], data: st.DataObject, seed: int
) -> None:
    culprit = data.draw(st.integers(0, size - 1), label="culprit")
    places = [i for i, item in enumerate(items) if applies(fault, item, items, i, size)]
    if not places:
        return
    place = data.draw(st.sampled_from(places), label="place")

    _, said = watched(Job(size).run(with_fault(items, fault, place, culprit)), seed)
    kind = {"size": "shape", "reduce_op": "reduce-op"}.get(fault, fault)
    assert [(verdict.kind, verdict.culprits) for verdict in said] == [
        (f"mismatch/{kind}", [culprit])
    ], [v.summary for v in said]


@SLOW
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=60), st.integers(0, 1 << 30)
)
def test_damage_ends_nothing(damage: list[tuple[float, int]], seed: int) -> None:
    """Bytes of the records and blobs are wrong: what is read is less, and nothing is raised."""
    node = Node(2, capacity=32)
    choose = random.Random(seed)
    for i in range(40):
        for rank in node.ranks:
            rank.issue(all_reduce(8 + i % 3), ranks=(0, 1), line=80 + i % 3)
        for where, bits in damage[i::40]:
            data = choose.choice(node.ranks).box.data
            data[4096 + int(where * (32 * 192 + 8000))] ^= bits
        node.look()
        node.ranks[i % 2].beat()
    node.settle()
