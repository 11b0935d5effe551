"""Ranks that wait for each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
import pytest
from builders import SCRIPT, Job, Op, Program, Stay, Step, all_reduce, collective, recv, send
from goldens import hold
from judging import blame, judge

from commlens.model.collective import Frame, FrameKind, State
from commlens.model.ranklog import ThreadStack


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


def _saves_on(savers: set[int], line: int, function: str) -> Program:
    """Ranks gather in each step; then some of them gather once more, and all meet in another
    group.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        control = job.group("1", range(job.size))
        main = (Frame(SCRIPT, 34, "main"),)
        for _ in range(8):
            for _ in range(3):
                yield collective("all_gather", job.world, 8, line=30, function="main")
            yield collective("reduce_scatter", job.world, 8, line=31, function="main")
            yield Step()
        if rank in savers:
            yield collective("all_gather", job.world, 8, line=line, function=function, callers=main)
        yield collective("barrier", control, line=38, function="main")

    return program


@pytest.mark.parametrize("savers", [{0}, {1}, {0, 2}])
def test_ranks_that_issue_one_collective_more(savers: set[int]) -> None:
    verdict = judge(Job(5).run(_saves_on(savers, 15, "save_model")).logs())
    assert blame(verdict) == ("cycle", "in-collective", sorted(savers), "train.py:15")
    assert all(left.one_more for left in verdict.cause.left_order)
    if savers == {0}:
        hold("cycle/one-collective-more", verdict)


@pytest.mark.parametrize(("batches", "odd"), [([16, 13, 13], 0), ([13, 13, 16], 2)])
def test_ranks_with_more_batches_than_the_others(batches: list[int], odd: int) -> None:
    """The others meet in another group after their last batch."""

    def program(job: Job, rank: int) -> Iterator[object]:
        control = job.group("1", range(job.size))
        for _ in range(batches[rank]):
            yield all_reduce(job.world, 100, line=20, function="train")
            yield Step()
        yield collective("barrier", control, line=30, function="main")

    verdict = judge(Job(3).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [odd])
    assert verdict.cause.blamed_by == "rounds"
    first, most = verdict.cause.rounds.last
    assert (first.ranks, first.number, most.number) == ([odd], 14, 13)
    if odd == 0:
        hold("cycle/more-batches", verdict)


def test_a_rank_behind_which_another_left_a_message_out_is_not_in_another_round() -> None:
    """Rank 0 leaves the message out, rank 1 waits for it: only rank 1 lacks the all_reduce."""

    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 1:
            yield recv(job.world, 0, line=10)
        yield all_reduce(job.world, line=20)

    verdict = judge(Job(4).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [])


def test_a_rank_behind_which_a_pair_was_left_out_is_not_in_another_round() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        pair = job.group("1", [0, 1])
        if rank == 1:
            yield all_reduce(pair, line=10)
        yield all_reduce(job.world, line=20)

    verdict = judge(Job(4).run(program).logs())
    assert verdict.culprits != [0] or verdict.cause.blamed_by != "rounds"


@pytest.mark.parametrize("rounds", [0, 5])
@pytest.mark.parametrize("odd", ["send", "recv"])
def test_a_schedule_of_a_pipeline_that_a_rank_leaves_out(rounds: int, odd: str) -> None:
    """Rank 1 alone, or rank 0, runs it once more, from another line: the message cannot be moved."""
    schedule = Frame(
        "/site/torch/distributed/pipelining/schedules.py",
        700,
        "_step_microbatches",
        FrameKind.TORCH,
    )
    alone = 0 if odd == "send" else 1

    def message(job: Job, rank: int, line: int) -> Op:
        op = (send if rank == 0 else recv)(job.world, 1 - rank, line=line)
        return dataclasses.replace(op, inner=(schedule,))

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(rounds):
            yield message(job, rank, 20)
            yield Step()
        if rank == alone:
            yield message(job, rank, 24)
            yield Stay(24, "step")
        yield all_reduce(job.world, line=26)

    job = Job(2).run(program)
    if odd == "send":
        last = job.ranks[0].log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        last.wait_began_ns, last.wait_thread = last.announced_ns, last.issue_thread
    verdict = judge(job.logs())
    assert verdict.kind == "cycle"
    unmet = verdict.cause.unmet_message
    assert (unmet.rank, unmet.message.op, unmet.issued) == (alone, odd, rounds)
    assert "train.py:24" in verdict.next_step and "train.py:26" in verdict.next_step
    hold(f"cycle/schedule-left-out-{odd}-{rounds}", verdict)


@pytest.mark.parametrize("others", ["none", "one-that-may-release-it"])
def test_two_threads_that_take_a_lock_in_any_order(others: str) -> None:
    """Each thread holds the lock during its own collective, and the other thread of its rank waits
    for it. Which comes first is chance: no rank is at fault.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        metrics = job.group("1", [0, 1])
        for _ in range(8):
            yield all_reduce(metrics, 1, line=11, function="log_metrics", thread=5000 + rank)
            yield all_reduce(job.world, 4, line=34, function="main")
        if rank == 0:
            yield all_reduce(job.world, 4, line=24, function="main")
        else:
            yield all_reduce(metrics, 1, line=11, function="log_metrics", thread=5001)

    logs = Job(2).run(program).logs()
    for rank, log in enumerate(logs):
        [blocked] = log.stacks
        lines = {0: Frame(SCRIPT, 10, "log_metrics"), 1: Frame(SCRIPT, 31, "main")}
        waiting = ThreadStack(
            5000 if rank == 0 else log.pid,
            "metrics",
            (lines[rank], *[Frame("/lib/threading.py", 937, "_bootstrap")][: 1 - rank]),
            is_main=rank == 1,
            in_lock=True,
        )
        blocked = msgspec.structs.replace(
            blocked,
            frames=(*blocked.frames, *[Frame("/lib/threading.py", 937, "_bootstrap")][:rank]),
            thread=log.pid if rank == 0 else 5001,
            is_main=rank == 0,
        )
        log.stacks = [blocked, waiting]
        if others != "none":
            log.stacks.append(ThreadStack(9, "other", (Frame(SCRIPT, 2, "serve"),)))
    verdict = judge(logs)
    if others != "none":
        assert verdict.kind == "missing"
        return
    assert blame(verdict) == ("cycle", "in-collective", [], None)
    hold("cycle/two-threads-and-a-lock", verdict)
