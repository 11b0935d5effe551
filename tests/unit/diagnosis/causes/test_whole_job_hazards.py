"""Latent faults as findings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Stay, all_reduce
from goldens import hold

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.cause import LatentFault
from commlens.model.collective import Frame, FrameKind
from commlens.model.hazard import Access, Hazard, HazardKind, Operand, Touch

C10D = Frame("/site/torch/distributed/distributed_c10d.py", 3000, "all_reduce", FrameKind.LIBRARY)
USER = Frame("/home/me/train.py", 12, "step", FrameKind.USER)
TORCH = Frame("/site/torch/optim/sgd.py", 300, "_multi_tensor_sgd", FrameKind.TORCH)
LATER = Frame("/home/me/train.py", 19, "step", FrameKind.USER)


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


@pytest.mark.parametrize(
    ("name", "what", "op", "access", "operand"),
    [
        ("input-written", "touched-in-flight", "aten.add_.Tensor", "written", "input"),
        ("output-written", "touched-in-flight", "aten.add_.Tensor", "written", "output"),
        ("output-read", "touched-in-flight", "aten.mul.Tensor", "read", "output"),
        ("shared", "shared-in-flight", "all_reduce", "written", "output"),
    ],
)
def test_a_touch_before_the_wait_has_both_lines(
    name: str, what: HazardKind, op: str, access: Access, operand: Operand
) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)

    logs = Job(2).run(program).logs()
    touch = Touch(op, access, operand, "float32[8]", (TORCH, LATER))
    for log in logs:
        log.hazards = [Hazard(what, 2, (C10D, USER), touch=touch)]
    verdict = diagnose_logs(logs)
    assert verdict.kind == "healthy"
    [finding] = verdict.findings
    cause = finding.cause
    assert isinstance(cause, LatentFault)
    assert (cause.source, cause.touched_at) == ("train.py:12", "train.py:19")
    assert (cause.what, cause.touched_by, cause.access, cause.operand) == (
        what,
        op,
        access,
        operand,
    )
    hold(f"in-flight/{name}", verdict)


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
