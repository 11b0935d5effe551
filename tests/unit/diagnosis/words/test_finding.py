"""Findings are made of a cause and its words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Stay, all_reduce

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.words.finding import Words, finding_of
from commlens.model.cause import Cause, Kind


def test_what_is_added_to_one_finding_is_not_in_the_next() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20) if rank else Stay(57, "load_batch")

    cause = diagnose_logs(Job(2).run(program).logs()).cause
    assert cause is not None
    words = Words("rank 1 never reached all_reduce #3")
    first, second = finding_of(cause, words), finding_of(cause, words)
    first.evidence.append("It is a warning.")
    assert second.evidence == finding_of(cause, Words("")).evidence == []


@pytest.mark.parametrize(
    ("kind", "is_certain"),
    [
        ("mismatch/shape", True),
        ("cycle", True),
        ("dead", True),
        ("missing", False),
        ("stuck-inside", False),
    ],
)
def test_a_finding_is_as_certain_as_its_cause(kind: Kind, is_certain: bool) -> None:
    """Some root causes are certain, whoever is to blame; a consequence is not."""
    about = {"kind": kind, "why": "unknown", "blamed_by": "nobody", "confidence": "low"}
    for root_cause in (True, False):
        cause = Cause(**about, root_cause=root_cause)
        assert finding_of(cause, Words("")).certain is (is_certain and root_cause)
