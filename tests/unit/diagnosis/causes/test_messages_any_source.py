"""Receives from any source: those that take the message of a later receive, and legal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from builders import (
    Die,
    Job,
    Op,
    Stay,
    Wait,
    all_reduce,
    collective,
    from_any_then_from_one,
    recv,
    send,
)
from goldens import hold

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.cause import TakenMessage
from commlens.model.collective import ProcessGroup
from commlens.model.ranklog import End, Observation
from commlens.model.verdict import Verdict


def judge(size: int, program: object) -> Verdict:
    verdict = diagnose_logs(Job(size).run(program).logs())
    assert [finding.root_cause for finding in verdict.findings].count(True) <= 1
    return verdict


def test_the_receive_from_any_source_took_the_message() -> None:
    verdict = judge(3, from_any_then_from_one)
    assert (verdict.kind, verdict.culprits, verdict.certain) == ("mismatch/p2p", [0], True)
    assert verdict.victims == [1, 2]
    hold("mismatch/p2p-taken-by-another-receive", verdict)
    cause = verdict.findings[0].cause
    assert isinstance(cause, TakenMessage)
    assert (cause.source, cause.taken_at) == ("train.py:11", "train.py:10")
    assert (cause.sent_at, cause.other_sender, cause.other_sent_at) == (
        "train.py:21",
        2,
        "train.py:22",
    )
    assert cause.races


@pytest.mark.parametrize(
    ("between", "waits", "races"),
    [
        (lambda world: all_reduce(world, line=30), False, False),
        (lambda world: all_reduce(world, line=30, is_async=True, handle="a"), True, False),
        # rank 2 issues its send before it waits for the all_reduce
        (lambda world: all_reduce(world, line=30, is_async=True, handle="a"), False, True),
        (lambda world: collective("broadcast", world, line=30, root=1), False, False),
        # rank 2 can leave the broadcast before rank 1 comes to it
        (lambda world: collective("broadcast", world, line=30, root=0), False, True),
        (lambda world: collective("reduce", world, line=30, root=2), False, False),
        (lambda world: collective("reduce", world, line=30, root=0), False, True),
    ],
)
def test_messages_that_a_collective_orders_do_not_race(
    between: Callable[[ProcessGroup], Op], waits: bool, races: bool
) -> None:
    """Rank 1 sends before a collective and rank 2 after it."""

    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 1:
            yield send(job.world, 0, line=20)
        yield between(job.world)
        if waits:
            yield Wait("a")
        if rank == 2:
            yield send(job.world, 0, line=21)
        if rank == 0:
            yield recv(job.world, None, line=10)
            yield recv(job.world, 1, line=11)
        yield all_reduce(job.world, line=31)

    cause = judge(3, program).findings[0].cause
    assert isinstance(cause, TakenMessage)
    assert cause.races is races


def test_a_sender_that_has_ended_sends_no_more() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield from list(from_any_then_from_one(job, rank))[: None if rank == 0 else 1]

    cause = judge(3, program).findings[0].cause
    assert isinstance(cause, TakenMessage)


def test_a_sender_that_still_runs_may_send_more() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for action in from_any_then_from_one(job, rank):
            yield action
            if rank == 1:
                yield Stay(57, "load_batch")

    verdict = judge(3, program)
    assert (verdict.kind, verdict.culprits) == ("missing", [1])


def test_a_sender_that_died_is_to_blame() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for action in from_any_then_from_one(job, rank):
            yield action
            if rank == 1:
                yield Die(Observation(End.KILLED, exit_code=-9, signal="SIGKILL"))

    verdict = judge(3, program)
    assert (verdict.kind, verdict.culprits) == ("dead", [1])


def test_the_rest_of_a_message_comes_from_the_sender_of_its_header() -> None:
    """Rank 2 leaves out the rest of its second message, and rank 3 has sent a header."""

    def program(job: Job, rank: int) -> Iterator[object]:
        senders = [1, 2, 3, 1, 2, 3]
        for i, sender in enumerate(senders):
            if rank == 0:
                yield recv(job.world, None, line=10)
                yield recv(job.world, sender, line=11)
            elif rank == sender:
                yield send(job.world, 0, line=20)
                if (rank, i) != (2, 4):
                    yield send(job.world, 0, line=21)
            if i != 4:
                yield all_reduce(job.world, line=30)

    verdict = judge(4, program)
    assert not isinstance(verdict.findings[0].cause, TakenMessage)
    assert (verdict.kind, verdict.culprits) == ("cycle", [])


def test_a_sum_from_any_source_is_legal() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            for _ in range(3):
                if rank == 0:
                    yield recv(job.world, None, line=10)
            if rank:
                yield send(job.world, 0, line=20)
            yield all_reduce(job.world, line=30)
        if rank == 1:
            yield Stay(57, "load_batch")
        yield all_reduce(job.world, line=31)

    verdict = judge(4, program)
    assert (verdict.kind, verdict.culprits) == ("missing", [1])


WORKS = Observation(End.RUNNING, window_s=5, proc_state="R", cpu_s=4.8, stack_moved=True)


def test_no_rank_sends() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=9)
        yield recv(job.world, None, line=10) if rank == 0 else Stay(57, "load_batch")

    verdict = judge(4, program)
    assert (verdict.kind, verdict.culprits) == ("missing", [1, 2, 3])
    hold("missing/message-of-any-rank", verdict)


def test_a_rank_that_works_may_send_what_others_do_not() -> None:
    """Rank 1 has finished, rank 2 sleeps; the message of rank 3 would do."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=9)
        if rank == 0:
            yield recv(job.world, None, line=10)
        if rank > 1:
            yield Stay(57, "load_batch", WORKS) if rank == 3 else Stay(58, "sleeps")

    verdict = judge(4, program)
    assert (verdict.kind, verdict.certain) == ("waiting", False)
    assert [finding.kind for finding in verdict.findings] == ["waiting"]


def test_ranks_that_have_finished_do_not_open_a_circle() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=9)
        if rank != 1:
            yield recv(job.world, None if rank == 0 else 0, line=10 + rank)

    verdict = judge(3, program)
    assert (verdict.kind, verdict.certain) == ("cycle", True)
    assert verdict.findings[0].cause is not None
    assert verdict.findings[0].cause.victims == [0, 2]
