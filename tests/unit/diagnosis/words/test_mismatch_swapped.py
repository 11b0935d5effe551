"""The words about a rank that swapped two collectives."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, Step, all_reduce
from goldens import hold

from commlens.diagnosis.live import find_out_of_step
from commlens.model.verdict import Verdict


def test_two_collectives_in_the_other_order() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(12):
            first = 21 if (rank, step) == (1, 9) else 20
            yield all_reduce(job.world, line=first)
            yield all_reduce(job.world, line=41 - first)
            yield Step()

    findings = find_out_of_step(Job(4).run(program).logs(), at_least=3)
    assert not any(each.certain for each in findings), "it may be on purpose"
    hold("swapped/two-lines", Verdict.from_findings(findings))
