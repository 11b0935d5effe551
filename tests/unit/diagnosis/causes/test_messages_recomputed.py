"""Messages that activation checkpointing issues again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from builders import Job, Op, Program, Stay, all_reduce, recv, send
from goldens import hold
from judging import blame, judge

from commlens.model.collective import Frame, FrameKind

RECOMPUTE = Frame("/site/torch/utils/checkpoint.py", 1688, "recompute_fn", FrameKind.TORCH)
REENTRANT = Frame("/site/torch/utils/checkpoint.py", 300, "backward", FrameKind.TORCH)
MEGATRON = Frame(
    "/site/megatron/core/tensor_parallel/random.py", 500, "backward", FrameKind.LIBRARY
)


def received_again(by: Frame | None, blocks: Op) -> Program:
    """Rank 0 sends twice and waits in ``blocks``; rank 1 receives three times, the last time in a
    recomputation.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(2):
            yield send(job.world, 1, line=26) if rank == 0 else recv(job.world, 0, line=13)
        if rank == 0:
            yield blocks
        else:
            callers = (by,) if by is not None else ()
            yield dataclasses.replace(recv(job.world, 0, line=13), callers=callers)
            yield all_reduce(job.world, line=50)

    return program


@pytest.mark.parametrize("by", [RECOMPUTE, REENTRANT, MEGATRON])
@pytest.mark.parametrize("blocks", ["recv", "all_reduce"])
def test_a_message_that_is_received_again_in_a_recomputation(by: Frame, blocks: str) -> None:
    job = Job(2)
    waits = recv(job.world, 1, line=32) if blocks == "recv" else all_reduce(job.world, line=50)
    verdict = judge(job.run(received_again(by, waits)).logs())
    assert blame(verdict) == ("cycle", "in-collective", [1], "train.py:13")
    again = verdict.cause.recomputed
    assert verdict.cause.blamed_by == "recomputation"
    assert (again.rank, again.message.sequence_number, again.issued) == (1, 3, 2)
    if by is RECOMPUTE:
        hold(f"cycle/received-again-before-{blocks}", verdict)


def test_a_message_of_a_recomputation_may_have_its_other_side() -> None:
    """Rank 0 sends it, but elsewhere: then the recomputation is not one too many."""
    job = Job(2)

    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 0:
            yield send(job.world, 1, line=26)
            yield recv(job.world, 1, line=32)
        else:
            yield dataclasses.replace(recv(job.world, 0, line=13), callers=(RECOMPUTE,))
            yield recv(job.world, 0, line=14)

    verdict = judge(job.run(program).logs())
    assert (verdict.kind, verdict.culprits, verdict.cause.recomputed) == ("cycle", [], None)


def test_a_rank_that_receives_from_its_own_code_again_is_not_in_a_recomputation() -> None:
    job = Job(2)
    own = Frame("/home/me/checkpointing.py", 3, "backward")
    verdict = judge(job.run(received_again(own, recv(job.world, 1, line=32))).logs())
    assert verdict.cause.recomputed is None


@pytest.mark.parametrize("stays", [True, False])
def test_a_message_that_a_rank_receives_again_in_a_recomputation(stays: bool) -> None:
    """The rank that sent it is elsewhere, or has finished: it sent as often as it should."""

    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 0:
            yield send(job.world, 1, line=26)
            if stays:
                yield Stay(40, "collect")
        if rank == 1:
            yield recv(job.world, 0, line=13)
            yield dataclasses.replace(recv(job.world, 0, line=13), callers=(RECOMPUTE,))

    verdict = judge(Job(3).run(program).logs())
    assert (verdict.kind, verdict.culprits, verdict.source) == ("missing", [1], "train.py:13")
    assert verdict.cause.blamed_by == "recomputation"
    assert (verdict.cause.recomputed.rank, verdict.cause.recomputed.issued) == (1, 1)
    hold(
        f"missing/received-again-{'of-a-rank-elsewhere' if stays else 'of-an-ended-rank'}", verdict
    )
