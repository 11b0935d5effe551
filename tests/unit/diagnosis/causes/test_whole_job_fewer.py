"""A rank that issued fewer collectives in a job that ended well: a root does not wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Step, collective
from goldens import hold
from judging import judge


def broadcasts(job: Job, rank: int) -> Iterator[object]:
    """Rank 2 leaves out the last one."""
    for i in range(5):
        if (rank, i) != (2, 4):
            yield collective("broadcast", job.world, 8, line=20, root=0)
        yield Step()


def test_the_rank_that_issued_fewer_is_named() -> None:
    verdict = judge(Job(4).run(broadcasts).logs())
    assert (verdict.cause.kind, verdict.culprits, verdict.is_fault) == ("missing", [2], True)
    hold("missing/fewer-collectives", verdict)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_rank_that_may_have_issued_more_than_is_recorded_is_not_named(wrapped: bool) -> None:
    logs = Job(4).run(broadcasts).logs()
    if wrapped:
        logs[0].collectives = logs[0].collectives[2:]
    else:
        del logs[0]
    assert judge(logs).culprits == []
