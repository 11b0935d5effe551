"""The words about calls that strict verification refused."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, all_reduce

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.ranklog import End, Observation
from commlens.model.refusal import Refusal, RefusedRow
from commlens.reports.terminal import render

ROWS = (
    RefusedRow((0,), ("[2]", "float32"), "train.py:21 in main", "x"),
    RefusedRow((1,), ("[3]", "float32"), "train.py:21 in main", "x"),
)
WORDS = (
    "Input shapes of x, rank 0: [2] float32 (train.py:21 in main)",
    "Input shapes of x, rank 1: [3] float32 (train.py:21 in main)",
)


def test_the_table_of_a_refusal_keeps_its_rows() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)

    logs = Job(2).run(program).logs()
    for log in logs:
        log.exception = "commlens.errors.DistributedOperationException: refused"
        log.refusal = Refusal(
            "mismatch/shape",
            "shape",
            "shape mismatches",
            "`train.gather`",
            (0, 1),
            heading="Input shapes",
            rows=ROWS,
        )
        log.closed, log.observation = True, Observation(End.FAILED, 1, ended_ns=log.captured_ns)
    verdict = diagnose_logs(logs)
    assert verdict.findings[0].evidence == [*WORDS]
    shown = render(verdict).splitlines()
    for row in WORDS:
        assert any(line.startswith(f"  - {row}") for line in shown), shown
