"""Disagreements that are found while the job runs."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, Stay, all_reduce

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.live import find_disagreements


def test_pairs_that_disagree_at_the_same_lines_are_one_fault_also_while_the_job_runs() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        pair = job.group(f"tp{rank // 2}", [rank // 2 * 2, rank // 2 * 2 + 1], "tp")
        yield all_reduce(pair, line=20)
        yield all_reduce(pair, line=30, reduce_op="SUM" if rank % 2 else "MAX")
        yield Stay(57, "load_batch")

    logs = Job(4).run(program).logs()
    [(finding, _)] = find_disagreements(logs)
    assert (finding.kind, finding.culprits, finding.victims) == (
        "mismatch/reduce-op",
        [],
        [0, 1, 2, 3],
    )
    assert [one.kind for one in diagnose_logs(logs).findings if one.root_cause] == [
        "mismatch/reduce-op"
    ]
