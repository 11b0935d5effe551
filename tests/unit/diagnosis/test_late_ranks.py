"""Which ranks others wait for, and how long these have been where they are."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, S, Stay, Step, all_reduce, at, training

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.late_ranks import late_ranks, stayed_ns


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
