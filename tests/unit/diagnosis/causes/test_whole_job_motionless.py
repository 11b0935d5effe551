"""No rank moves, and none is in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from builders import Job, Stay, all_reduce
from goldens import hold
from judging import blame, judge

from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import End, HelperProcess, Observation


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


def test_no_reason_is_given_where_ranks_have_several() -> None:
    """It is not that of whichever rank is the last."""
    logs = Job(4).run(all_stay(Stay(40, "build"), Stay(44, "load_batch"))).logs(after_s=200)
    assert (judge(logs).kind, judge(logs).why) == ("missing", "unknown")


def test_the_processes_that_the_ranks_started_are_evidence() -> None:
    logs = Job(4).run(all_stay(Stay(40, "result"))).logs(after_s=200)
    stacks = {0: "gather_object", 1: "os_write"}
    for rank, function in stacks.items():
        file = "/env/torch/distributed/distributed_c10d.py" if rank == 0 else "/env/writer.py"
        stack = (Frame(file, 7, function), Frame("/env/planner.py", 9, "plan"))
        logs[rank].observation.helpers = [HelperProcess(3000 + rank, "abc", stack)]
    assert judge(logs).findings[0].evidence[-2:] == [
        "Process 3000, which rank 0 started, is in gather_object at planner.py:9.",
        "Process 3001, which rank 1 started, is in no collective, but at writer.py:7.",
    ]


WORKS = Observation(
    End.RUNNING, window_s=9, proc_state="S", cpu_s=0.0, stack_moved=False, children_cpu_s=8.0
)


IDLE = (
    Frame("/lib/selectors.py", 468, "select", FrameKind.PYTHON),
    Frame("/lib/python3.11/asyncio/a.py", 6, "run_forever", FrameKind.PYTHON),
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
