"""A rank that waits, while nothing shows for whom."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, all_reduce, recv
from goldens import hold
from judging import judge


def test_a_receive_from_any_rank_of_which_there_is_no_other_record() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=20)
        if rank == 1:
            yield recv(job.world, 0, line=30)

    logs = Job(2).run(program).logs()
    logs[1].collectives[-1].peer = None
    verdict = judge(logs[1:])
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [], [1])
    assert verdict.confidence == "low"
    hold("missing/unexplained", verdict)
