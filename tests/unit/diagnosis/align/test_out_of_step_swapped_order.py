"""A rank that uses its groups in another order than before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Step, all_reduce
from goldens import hold
from judging import blame, judge


@pytest.mark.parametrize("size", [2, 4, 8])
def test_order_swapped_across_two_groups(size: int) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        a, b = job.group("1", range(size), "gradients"), job.group("2", range(size), "statistics")
        for i in range(8):
            order = [(b, 31), (a, 30)] if (rank, i) == (1, 6) else [(a, 30), (b, 31)]
            for group, line in order:
                yield all_reduce(group, 4, line=line)
            yield Step()

    verdict = judge(Job(size).run(program).logs())
    assert blame(verdict) == ("cycle", "in-collective", [1], "train.py:31")
    assert verdict.victims == [r for r in range(size) if r != 1]
    if size == 4:
        hold("cycle/two-groups-swapped", verdict)


def test_order_swapped_across_three_groups() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        edges = [(1, 2), (1, 3), (2, 3)]
        groups = [job.group(f"e{a}{b}", (a, b), f"edge-{a}-{b}") for a, b in edges]
        for i in range(8):
            mine = [g for g in groups if rank in g.ranks]
            for group in reversed(mine) if (rank, i) == (2, 6) else mine:
                yield all_reduce(group, 4, line=30)
            yield all_reduce(job.world, 4, line=31)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert (verdict.kind, verdict.culprits, verdict.source) == ("cycle", [2], "train.py:30")
    assert [wait.rank for wait in verdict.cause.ring] == [1, 2, 3]
    hold("cycle/three-groups", verdict)
