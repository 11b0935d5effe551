"""Ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Stay, Step, all_reduce, recv, send
from goldens import hold
from judging import blame, judge

from commlens.model.collective import State


def test_a_receive_that_nobody_sends() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        partner = rank ^ 1
        for i in range(8):
            if rank % 2 == 0:
                yield send(job.world, partner, line=30)
                yield recv(job.world, partner, line=31)
            else:
                yield recv(job.world, partner, line=33)
                yield send(job.world, partner, line=34)
            if (rank, i) == (2, 6):
                yield recv(job.world, partner, line=36)
            yield all_reduce(job.world, 100, line=40)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert blame(verdict) == ("cycle", "in-collective", [2], "train.py:36")
    assert verdict.victims == [0, 1, 3]
    hold("cycle/receive-that-nobody-sends", verdict)


@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_message_that_the_other_side_issues_only_after_a_collective(first: str) -> None:
    """Five messages of one side in front of a collective, four of the other: no rank is to blame,
    but the fifth is named.
    """
    mine, theirs = (send, recv) if first == "send" else (recv, send)

    def program(job: Job, rank: int) -> Iterator[object]:
        make = mine if rank == 0 else theirs
        for _ in range(5 if rank == 0 else 4):
            yield make(job.world, 1 - rank, line=8)
        yield all_reduce(job.world, 1, line=25)

    job = Job(2).run(program)
    if first == "send":  # gloo's sends of small tensors do not wait, those of large ones do
        job = Job(2)

        def blocked(job: Job, rank: int) -> Iterator[object]:
            yield from (
                program(job, rank) if rank else [send(job.world, 1, line=8) for _ in range(5)]
            )
            yield Stay(8, "exchange")

        job.run(blocked)
        last = job.ranks[0].log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        last.wait_began_ns, last.wait_thread = last.announced_ns, last.issue_thread
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [])
    unmet = verdict.cause.unmet_message
    assert (unmet.rank, unmet.message.op, unmet.issued) == (0, first, 4)
    assert (unmet.stands_in.op, unmet.stands_in.sequence_number) == ("all_reduce", 1)
    hold(f"cycle/fifth-{first}-after-a-collective", verdict)


def test_what_is_said_of_several_ranks_holds_for_each() -> None:
    """The sides of a cycle are in groups of the same kind, which have numbers for names."""

    def program(job: Job, rank: int) -> Iterator[object]:
        column = job.group(str(rank % 2 + 1), [rank % 2, rank % 2 + 2])
        if rank >= 2:
            yield all_reduce(column, 4, line=17, function="reduce_tracker")
        yield all_reduce(job.world, 1, line=45, function="main")

    verdict = judge(Job(4).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [])
    hold("cycle/groups-of-one-kind", verdict)


@pytest.mark.parametrize("left_out", ["send", "recv"])
def test_a_rank_that_leaves_a_message_out_before_a_collective(left_out: str) -> None:
    """In the sixth round, one side of the message goes on to the collective."""
    odd = 0 if left_out == "send" else 1

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            if rank < 2 and not (i == 5 and rank == odd):
                yield (send if rank == 0 else recv)(job.world, 1 - rank, line=7 + rank)
                if i == 5 and rank == 0:  # this send waits for its receive
                    yield Stay(7, "exchange")
            yield all_reduce(job.world, 1, line=9)

    job = Job(3).run(program)
    if left_out == "recv":
        last = job.ranks[0].log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        last.wait_began_ns, last.wait_thread = last.announced_ns, last.issue_thread
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [odd])
    hold(f"cycle/left-out-{left_out}", verdict)
