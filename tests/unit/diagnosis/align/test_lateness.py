"""Ranks that were only late when the others ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, S, Stay, all_reduce, at, training
from judging import blame, judge

from commlens.model.collective import State
from commlens.model.ranklog import End, Observation

SLEEP = Stay(57, "load_batch")


@pytest.mark.parametrize(("waited_s", "culprits"), [(2, [1]), (30, [2])])
def test_a_rank_that_was_ended_with_the_others_may_only_have_been_late(
    waited_s: int, culprits: list[int]
) -> None:
    """Rank 1 is killed unseen while it waits for rank 2, and the launcher ends the others."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=40)
        if rank == 2:
            yield SLEEP
        yield all_reduce(job.world, line=50)

    job = Job(3).run(program)
    logs = job.logs()
    for log in logs:
        log.captured_ns = logs[0].collectives[-1].announced_ns + waited_s * S
        log.observation = (
            Observation(End.GONE)
            if log.rank == 1
            else Observation(End.KILLED, signal="SIGTERM", ended_ns=job.now)
        )
    assert judge(logs).culprits == culprits


def test_stuck_until_the_timeout_then_ended_by_the_launcher() -> None:
    """The one that the launcher stopped slept; those that failed first waited for it."""
    job = Job(4).run(training(at(2, 5, SLEEP)))
    logs = job.logs()
    for log in logs:
        last = log.collectives[-1]
        if log.rank == 2:
            log.observation = Observation(
                End.KILLED, signal="SIGTERM", ended_ns=job.now + 26_000_000_000
            )
        else:
            last.state, last.error = (
                State.FAILED,
                "RuntimeError: Timed out waiting 25000ms for recv operation to complete",
            )
            last.done_ns = job.now + 25_000_000_000
            log.exception = last.error
            log.observation = Observation(End.FAILED, 1, ended_ns=job.now + 25_000_000_000)
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")
