"""Records of a job whose ring buffers have wrapped."""

from __future__ import annotations

from builders import Job, Stay, at, training
from goldens import hold
from judging import blame, judge

SLEEP = Stay(57, "load_batch")


def test_wrapped_rings_do_not_make_ranks_missing() -> None:
    logs = Job(4).run(training(at(2, 7, SLEEP))).logs()
    for log in logs:
        log.collectives = log.collectives[-(3 + log.rank) :]
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")


def test_overwritten_records_are_called_so() -> None:
    logs = Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs()
    for log in logs:
        log.collectives = log.collectives[2:]
    hold("missing/oldest-records-overwritten", judge(logs))
