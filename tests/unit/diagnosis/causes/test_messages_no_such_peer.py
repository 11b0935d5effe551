"""A message of a rank that does not exist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, S, all_reduce, recv
from goldens import hold
from refused_jobs import refuse

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.ranklog import End, Observation
from commlens.model.refusal import Refusal


@pytest.mark.parametrize("refused", [False, True])
def test_a_message_of_a_rank_that_does_not_exist(refused: bool) -> None:
    """It is the argument of rank 0, not a node whose dump is missing."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        yield recv(job.world, 2 if rank == 0 else 0, line=11 + rank)

    logs = Job(2).run(program).logs()
    if refused:
        for log in refuse(logs):
            log.refusal = Refusal("mismatch/p2p", "peer", ranks=(0, 1), culprits=(0,))
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("mismatch/p2p", [0], "high")
    hold(f"mismatch/p2p-of-no-such-rank{'-refused' if refused else ''}", verdict)
    assert len([finding for finding in verdict.findings if finding.root_cause]) == 1


def test_a_crash_in_such_a_message_follows_from_it() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 1:
            yield recv(job.world, 7, line=20)
        yield all_reduce(job.world, line=30)

    logs = Job(3).run(program).logs()
    logs[1].observation = Observation(
        End.KILLED, signal="SIGSEGV", ended_ns=logs[1].collectives[-1].announced_ns + S
    )
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("mismatch/p2p", [1], [0, 2])
    assert [finding.root_cause for finding in verdict.findings].count(True) == 1
