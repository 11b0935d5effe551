"""Which logs are of the job that is diagnosed."""

from __future__ import annotations

import msgspec
from builders import Job, Stay, at, training
from goldens import hold
from judging import judge

SLEEP = Stay(57, "load_batch")


def test_other_jobs_are_left_out_and_named() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    other = Job(2, job="old").run(training(lambda *_: None)).logs()
    verdict = judge([*other, *logs])
    assert verdict.culprits == [2]
    hold("missing/another-job-beside", verdict)


def test_the_newer_of_two_logs_of_a_rank_counts() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    older = msgspec.structs.replace(
        logs[0], collectives=logs[0].collectives[:3], issued=3, heartbeat_ns=1, pid=4
    )
    verdict = judge([older, *logs])
    assert verdict.culprits == [2]
    hold("missing/two-logs-of-a-rank", verdict)
