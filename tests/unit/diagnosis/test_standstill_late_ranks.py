"""Which ranks others wait for, how long these have been where they are, and which may go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import SCRIPT, Job, S, Stay, Step, all_reduce, at, training

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.standstill import late_ranks, may_go_on, stayed_ns
from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import End, Observation


def test_a_rank_that_does_not_come_is_late() -> None:
    logs = Job(4).run(training(at(2, 6, Stay(57, "load_batch")))).logs()  # type: ignore[arg-type]
    last = logs[2].collectives[-1]
    last.returned_ns = last.done_ns = last.wait_ended_ns = logs[2].captured_ns - 5 * S
    late = late_ranks(diagnose_logs(logs), logs)
    assert [log.rank for log in late] == [2]
    assert stayed_ns(late) == 5 * S


def test_no_rank_is_late_where_the_one_that_waits_is_to_blame() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(6 if rank == 2 else 5):
            yield all_reduce(job.world, line=20)
            yield Step()

    logs = Job(4).run(program).logs()  # type: ignore[arg-type]
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    assert late_ranks(verdict, logs) == []
    assert stayed_ns([]) == 0


def still(**seen: object) -> Observation:
    """A process that was watched and did not move."""
    at_rest: dict[str, object] = {"window_s": 5.0, "proc_state": "S", "cpu_s": 0.0}
    return Observation(End.RUNNING, **{**at_rest, "stack_moved": False, **seen})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(still(waits_for="it sleeps"), True, id="asleep"),
        pytest.param(
            still(waits_for="it waits for a lock", waits_for_pid=4), True, id="lock of no rank"
        ),
        pytest.param(still(proc_state="T", stopped_fraction=1.0), True, id="stopped"),
        pytest.param(still(proc_state="D"), True, id="disk"),
        pytest.param(still(waits_for="it sleeps", holds_gil=True), False, id="holds the GIL"),
        pytest.param(still(), False, id="nothing shows why"),
        pytest.param(still(throttled_fraction=0.9), False, id="throttled"),
    ],
)
def test_a_rank_that_waits_for_something_outside_of_the_job_may_go_on(
    seen: Observation, expected: bool
) -> None:
    logs = Job(4).run(training(at(2, 6, Stay(57, "step", seen)))).logs()  # type: ignore[arg-type]
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    assert may_go_on(verdict, logs) is expected


def test_a_rank_that_waits_for_a_process_which_it_started_may_go_on() -> None:
    library = "/usr/lib/python3.11"
    wait = [
        Frame(f"{library}/selectors.py", 415, "select", FrameKind.PYTHON),
        Frame(f"{library}/multiprocessing/connection.py", 947, "wait", FrameKind.PYTHON),
    ]
    loader = Frame("/torch/utils/data/dataloader.py", 1291, "_try_get_data", FrameKind.TORCH)
    lock = Frame(f"{library}/threading.py", 327, "wait", FrameKind.PYTHON)
    for frames, expected in (((*wait, loader), True), ((lock, loader), False)):
        stay = Stay(57, "main", still(), frames=(*frames, Frame(SCRIPT, 57, "main")))
        logs = Job(4).run(training(at(2, 6, stay))).logs()  # type: ignore[arg-type]
        verdict = diagnose_logs(logs)
        assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "data-loading", [2])
        assert may_go_on(verdict, logs) is expected


def test_a_rank_whose_lock_another_rank_holds_waits_for_the_job() -> None:
    seen = still(waits_for="it waits for a lock")
    logs = Job(4).run(training(at(2, 6, Stay(57, "step", seen)))).logs()  # type: ignore[arg-type]
    verdict = diagnose_logs(logs)
    assert may_go_on(verdict, logs)
    logs[2].observation.waits_for_pid = logs[1].pid
    assert not may_go_on(verdict, logs)


def test_all_late_ranks_must_wait_for_something_outside_of_the_job() -> None:
    def stay(job: Job, rank: int, step: int | None) -> Iterator[object]:
        if rank in (1, 2) and step == 6:
            yield Stay(57, "step", still(waits_for="it sleeps" if rank == 1 else ""))

    logs = Job(4).run(training(stay)).logs()  # type: ignore[arg-type]
    verdict = diagnose_logs(logs)
    assert verdict.culprits == [1, 2]
    assert not may_go_on(verdict, logs)
    logs[2].observation.waits_for = "it sleeps"
    assert may_go_on(verdict, logs)
