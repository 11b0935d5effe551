"""No rank moves, and none is in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from builders import Job, Stay, all_reduce
from goldens import hold
from judging import blame, judge

from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import End, Observation


def all_stay(stay: Stay, also: Stay | None = None) -> Callable[[Job, int], Iterator[object]]:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 100, line=20)
        yield also if also is not None and rank == 1 else stay

    return program


def test_ranks_that_stand_still_outside_of_collectives() -> None:
    """In a file lock that nobody gives back, for example."""
    verdict = judge(Job(4).run(all_stay(Stay(40, "build"), Stay(44, "load"))).logs(after_s=200))
    assert (*blame(verdict), verdict.confidence) == ("missing", "user-code", [], None, "low")
    assert verdict.victims == [0, 1, 2, 3]
    hold("missing/motionless", verdict)


WORKS = Observation(
    End.RUNNING, window_s=9, proc_state="S", cpu_s=0.0, stack_moved=False, children_cpu_s=8.0
)


IDLE = (
    Frame("/lib/selectors.py", 468, "select", FrameKind.PYTHON),
    Frame("/lib/asyncio/a.py", 6, "run_forever", FrameKind.PYTHON),
)


@pytest.mark.parametrize("also", [Stay(44, "build", WORKS), Stay(44, "main", None, IDLE), None])
def test_a_job_may_stand_still(also: Stay | None) -> None:
    """For a while, while a rank works, or while it waits for requests; and a rank elsewhere may
    work.
    """
    logs = (
        Job(4).run(all_stay(Stay(40, "build"), also)).logs(after_s=200 if also is not None else 170)
    )
    assert judge(logs).kind == "healthy"
    assert judge(logs[:1] + logs[2:]).kind != "missing"
