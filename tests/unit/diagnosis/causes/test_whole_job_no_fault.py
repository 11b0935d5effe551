"""Jobs in which nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, Stay, Step, Wait, all_reduce, at, collective, training
from goldens import hold
from judging import judge

from commlens.model.ranklog import End, Observation

SLEEP = Stay(57, "load_batch")


def test_a_job_that_ran_to_its_end_is_healthy() -> None:
    verdict = judge(Job(4).run(training(lambda *_: None)).logs())
    assert (verdict.kind, verdict.culprits, verdict.is_fault) == ("healthy", [], False)
    hold("healthy/ended-well", verdict)


def test_a_collective_in_flight_for_a_moment_is_healthy() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs(after_s=0.3)
    assert judge(logs).kind == "healthy"


def test_a_root_need_not_wait() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(5):
            if i == 3 and rank:
                yield Stay(12, "agree", Observation(End.RUNNING, window_s=5, cpu_s=3.0))
            yield collective("broadcast", job.world, 1, line=10, root=0)
            yield Step()
        yield Stay(99, "idle")

    assert not judge(Job(4).run(program).logs()).is_fault


def test_an_unread_reduce_op_is_no_disagreement() -> None:
    verdict = judge(
        Job(4)
        .run(training(at(2, 5, lambda job: all_reduce(job.world, 100, line=20, reduce_op=None))))
        .logs()
    )
    assert verdict.kind == "healthy"


def test_lines_may_differ_legally() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(8):
            yield collective("broadcast", job.world, 1, line=10 if rank == 0 else 12, root=0)
            yield all_reduce(job.world, 1, line=13)
            yield all_reduce(job.world, 1, line=14 if rank % 2 else 15)
            yield Step()

    for size in (2, 4):
        assert judge(Job(size).run(program).logs()).kind == "healthy"


def test_asynchronous_orders_are_legal() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        a, b = job.group("1", range(4)), job.group("2", range(4))
        for _ in range(5):
            for name in "ab" if rank % 2 else "ba":
                yield all_reduce(
                    a if name == "a" else b,
                    4,
                    line=20 if name == "a" else 21,
                    is_async=True,
                    handle=name,
                )
            for name in "ab" if rank % 3 else "ba":
                yield Wait(name)
            yield Step()

    assert judge(Job(4).run(program).logs()).kind == "healthy"
