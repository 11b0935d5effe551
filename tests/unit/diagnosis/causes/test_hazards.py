"""Latent faults as findings."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, Stay, all_reduce
from goldens import hold

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.collective import Frame, FrameKind
from commlens.model.hazard import Hazard

C10D = Frame("/site/torch/distributed/distributed_c10d.py", 3000, "all_reduce", FrameKind.LIBRARY)
USER = Frame("/home/me/train.py", 12, "step", FrameKind.USER)


def test_they_are_findings_that_change_no_verdict() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)

    logs = Job(2).run(program).logs()
    for log in logs:
        log.hazards = [Hazard("never-waited", 3, (C10D, USER))]
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.is_fault, verdict.culprits) == ("healthy", False, [])
    assert [(each.kind, each.culprits, each.root_cause) for each in verdict.findings] == [
        ("hazard", [0, 1], False)
    ]
    hold("healthy/with-a-latent-fault", verdict)


def test_a_stuck_job_keeps_its_verdict() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank == 1:
            yield Stay(57, "load_batch")
        yield all_reduce(job.world, 8, line=10)

    logs = Job(2).run(program).logs()
    before = diagnose_logs(logs)
    logs[0].hazards = [Hazard("not-a-member", 1, (C10D, USER))]
    after = diagnose_logs(logs)
    assert (after.kind, after.culprits, after.summary) == (
        before.kind,
        before.culprits,
        before.summary,
    )
    assert after.findings[-1].kind == "hazard"
