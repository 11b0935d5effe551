"""Who waits for whom, where records alone tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from builders import Job, Stay, all_reduce, spec

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.cause import Cycle
from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    FrameKind,
    LearnedHow,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import Observation, RankLog, ThreadStack

SECOND = 10**9
BEGAN = 1_000 * SECOND
CHANNEL = Channel(ProcessGroup("0", (0, 1), "default_pg", "nccl"), "cuda", runs_ahead=True)


def device_log(rank: int, *batches: tuple[str, int, int]) -> RankLog:
    """A rank that issued these to its device: (op, how many, line). Several are one batch."""
    log = RankLog(rank=rank, world_size=2, pid=100 + rank, captured_ns=BEGAN + 60 * SECOND)
    messages = 0
    for number, (op, size, line) in enumerate(batches, start=1):
        stack = (Frame("/home/me/train.py", line, "step"),)
        is_message = op in ("send", "recv")
        members = size if is_message else 0
        for last in [False] * members + [True]:
            messages += not last
            log.collectives.append(
                Collective(
                    index=len(log.collectives) + 1,
                    channel=CHANNEL,
                    sequence_number=messages if not last else 0 if members else 1,
                    args=CollectiveArgs(
                        op if not last or not members else "coalesced", op, (spec(8),)
                    ),
                    state=State.ISSUED if last else State.UNKNOWN,
                    announced_ns=BEGAN + number,
                    returned_ns=BEGAN + number,
                    learned_how=LearnedHow.ENQUEUED if last else LearnedHow.NOT_YET,
                    stack=stack,
                    peer=None if last else 1 - rank,
                    coalescing_id=number if members else 0,
                    coalesced_members=members if last else 0,
                )
            )
    log.issued = len(log.collectives)
    return log


def test_a_batch_waits_for_the_message_that_is_queued_behind_the_peers_collective() -> None:
    """NCCL completes a batch as a whole, and what is enqueued behind a collective has not begun."""
    sender = device_log(0, ("send", 3, 10), ("all_reduce", 1, 11))
    receiver = device_log(1, ("recv", 2, 20), ("all_reduce", 1, 21), ("recv", 1, 22))
    first_batch = receiver.collectives[2]
    first_batch.state, first_batch.done_ns = State.COMPLETED, BEGAN + SECOND
    verdict = diagnose_logs([sender, receiver])
    assert verdict.kind == "cycle" and verdict.certain
    assert len(verdict.findings) == 1
    cause = verdict.findings[0].cause
    assert isinstance(cause, Cycle)
    ring = {(wait.rank, wait.collective.op, wait.collective.sequence_number) for wait in cause.ring}
    assert ring == {(0, "send", 3), (1, "all_reduce", 1)}


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (Observation(window_s=2.0, stack_moved=False, running_fraction=1.0, cpu_s=2.0), "cycle"),
        (Observation(window_s=2.0, stack_moved=False, waits_for="sleeps"), "missing"),
        (Observation(), "missing"),
    ],
)
def test_a_batch_that_is_copied_to_the_device_waits_for_it(seen: Observation, kind: str) -> None:
    """``.to("cuda")`` in load_batch waits for what is in flight, and spins. Nothing but the function
    is seen, whose name tells of a data loader. Found on an H200.
    """
    first, second = device_log(0, ("recv", 1, 10)), device_log(1, ("recv", 1, 20))
    batch = (
        Frame("/home/me/train.py", 57, "load_batch"),
        Frame("/home/me/train.py", 19, "step"),
    )
    second.stacks.append(ThreadStack(101, "MainThread", batch, second.captured_ns, True))
    second.observation = seen
    verdict = diagnose_logs([first, second])
    assert verdict.kind == kind
    assert verdict.culprits == ([1] if kind == "missing" else [])


PARITY = [
    Channel(ProcessGroup(str(1 + odd), (odd, odd + 2), "", "nccl"), "cuda", runs_ahead=True)
    for odd in range(2)
]
WORLD = Channel(ProcessGroup("0", (0, 1, 2, 3), "default_pg", "nccl"), "cuda", runs_ahead=True)
STEPS = 6


def parity_log(rank: int) -> RankLog:
    """A rank whose steps reduce in its half and broadcast to all. Rank 2 leaves the last broadcast
    out; the others' devices wait in it.
    """
    log = RankLog(rank=rank, world_size=4, pid=100 + rank, captured_ns=BEGAN + 8 * SECOND)
    calls = [("reduce_scatter", PARITY[rank % 2], 45), ("broadcast", WORLD, 51)] * STEPS
    if rank == 2:
        calls[-1] = calls[0]
    numbers: Counter[Channel] = Counter()
    for index, (op, channel, line) in enumerate(calls, start=1):
        numbers[channel] += 1
        announced = BEGAN + index * SECOND // 16
        is_last = index == len(calls)
        log.collectives.append(
            Collective(
                index=index,
                channel=channel,
                sequence_number=numbers[channel],
                args=CollectiveArgs(op, op, (spec(8),), root=0 if op == "broadcast" else None),
                state=State.ISSUED if is_last else State.COMPLETED,
                announced_ns=announced,
                returned_ns=announced,
                done_ns=0 if is_last else announced + 1000,
                learned_how=LearnedHow.ENQUEUED if is_last else LearnedHow.NOT_YET,
                stack=(Frame("/home/me/train.py", line, op),),
            )
        )
    log.issued = len(calls)
    at = (Frame("/home/me/train.py", calls[-1][2], "train_step"),)
    log.stacks.append(ThreadStack(log.pid, "MainThread", at, log.captured_ns, True))
    return log


@pytest.mark.parametrize("asleep", [(), (0,), (2,), (0, 2), (0, 1, 2, 3)])
def test_a_short_sleep_of_a_thread_that_polls_is_not_what_it_waits_for(
    asleep: tuple[int, ...],
) -> None:
    """A soak's job was given four verdicts, by the moment in which each rank was looked at last:
    threads that waited for the device and ran in four of ten samples, some just then asleep.
    """
    logs = [parity_log(rank) for rank in range(4)]
    for log, runs in zip(logs, (0.382, 0.473, 0.418, 0.436), strict=True):
        log.observation = Observation(
            window_s=5.8,
            proc_state="S",
            cpu_s=1.7,
            running_fraction=runs,
            stack_moved=False,
            waits_for="it sleeps" if log.rank in asleep else "",
        )
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits) == ("cycle", [2])
    assert [finding.culprits for finding in verdict.findings if finding.root_cause] == [[2]]


def test_a_thread_that_joins_one_of_two_stuck_threads_may_join_either() -> None:
    """One of them waits for rank 0, which waits for this rank: a deadlock if the thread joins that
    one. The other one waits for rank 2, which loads data.
    """
    join = Frame("/usr/lib/python3.12/threading.py", 1149, "join", FrameKind.LIBRARY)
    threads = (5001, 5002)

    def program(job: Job, rank: int) -> Iterator[object]:
        with_0, with_2 = job.group("1", [0, 1]), job.group("2", [1, 2])
        yield all_reduce(job.world, line=10)
        if rank == 0:
            yield all_reduce(job.group("3", [0, 1]), line=11)
        elif rank == 1:
            for group, thread in zip((with_0, with_2), threads, strict=True):
                yield all_reduce(group, line=20, is_async=True, handle=group.name, thread=thread)
            yield Stay(30, "main", frames=(join,))
        else:
            yield Stay(57, "load_batch")

    logs = Job(3).run(program).logs(after_s=300)
    for op, thread in zip(logs[1].collectives[1:], threads, strict=True):
        op.wait_began_ns, op.wait_thread = op.returned_ns, thread
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    assert all(finding.kind != "cycle" for finding in verdict.findings)
