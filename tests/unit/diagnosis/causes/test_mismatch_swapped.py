"""Collectives in another order than the others', as data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Step, all_reduce

from commlens.diagnosis.causes.mismatch import SwappedCase, find_swapped
from commlens.diagnosis.index.log_index import index_logs


def swapped(size: int, odd: int | None) -> list[SwappedCase]:
    """A job that reduces at lines 20 and 21 in each step; in step 9, ``odd`` swaps them."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(12):
            first = 21 if (rank, step) == (odd, 9) else 20
            yield all_reduce(job.world, line=first)
            yield all_reduce(job.world, line=41 - first)
            yield Step()

    job = index_logs(Job(size).run(program).logs(), 1.0)
    return [found for key in sorted(job.users) for found in find_swapped(job, key)]


@pytest.mark.parametrize(("size", "by"), [(2, "routine"), (4, "majority")])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_swaps_two_collectives(size: int, odd: int, by: str) -> None:
    [found] = swapped(size, odd)
    cause = found.cause
    assert (cause.culprits, cause.blamed_by, cause.confidence) == ([odd], by, "medium")
    assert cause.victims == [rank for rank in range(size) if rank != odd]
    assert (cause.first, cause.last) == (19, 20)
    assert cause.own == ["train.py:21", "train.py:20"]
    assert cause.others == ["train.py:20", "train.py:21"]
    assert not cause.certain, "it may be on purpose"


def test_none_swaps() -> None:
    assert swapped(4, None) == []
