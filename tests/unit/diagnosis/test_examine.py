"""The diagnosis as a whole. The tests of a finding are beside its cause, in ``causes/``."""

from __future__ import annotations

from builders import Job, Stay, at, training
from judging import judge


def test_no_logs() -> None:
    assert judge([]).missing_evidence


def test_the_larger_fault_comes_first_and_what_it_causes_is_no_fault_of_its_own() -> None:
    """Rank 2 sleeps in a job, and rank 0 of another one, whose dumps lie beside it."""
    logs = Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs()
    other = Job(2, job="old").run(training(at(0, 5, Stay(57, "load_batch")))).logs()
    verdict = judge([*other, *logs])
    assert [(finding.culprits, finding.root_cause) for finding in verdict.findings] == [([2], True)]
