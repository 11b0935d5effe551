"""A rank that leaves the order of its messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Step, all_reduce, recv, send
from goldens import hold
from judging import blame, judge


def test_both_receive_first() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        partner = rank ^ 1
        for i in range(8):
            if rank % 2 == 0 and (rank, i) != (2, 6):
                yield send(job.world, partner, line=30)
                yield recv(job.world, partner, line=31)
            else:
                yield recv(job.world, partner, line=33)
                yield send(job.world, partner, line=34)
            yield all_reduce(job.world, 100, line=40)
            yield Step()

    assert blame(judge(Job(8).run(program).logs())) == (
        "cycle",
        "in-collective",
        [2],
        "train.py:33",
    )
    verdict = judge(Job(4).run(program).logs())
    assert verdict.culprits == [2]
    hold("cycle/both-receive-first", verdict)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_pipeline_with_a_lost_send(size: int) -> None:
    bad = size // 2

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(7):
            for _ in range(2):
                if rank:
                    yield recv(job.world, rank - 1, line=20)
                if rank < size - 1:
                    yield send(job.world, rank + 1, line=21)
            for micro in range(2):
                if rank < size - 1:
                    yield recv(job.world, rank + 1, line=22)
                if rank and not (rank == bad and i == 5 and micro == 1):
                    yield send(job.world, rank - 1, line=23)
            yield Step()

    verdict = judge(Job(size).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [bad])
    [left] = verdict.cause.left_order
    assert (left.rank, left.instead_of.op, left.instead_of.peer) == (bad, "send", bad - 1)
    if size == 4:
        hold("cycle/lost-send", verdict)


def test_a_batch_without_its_send() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(8):
            if (rank, i) != (2, 6):
                yield send(job.world, (rank + 1) % 4, line=30)
            yield recv(job.world, (rank - 1) % 4, line=30)
            yield all_reduce(job.world, 100, line=40)
            yield Step()

    assert (lambda v: (v.kind, v.culprits))(judge(Job(4).run(program).logs())) == ("cycle", [2])
