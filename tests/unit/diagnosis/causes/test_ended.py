"""Jobs that were ended from outside."""

from __future__ import annotations

import pytest
from builders import Job, S, Stay, at, training
from goldens import hold
from judging import judge

from commlens.model.ranklog import End, Observation

SLEEP = Stay(57, "load_batch")


@pytest.mark.parametrize("seconds", [0, 30])
def test_a_hung_job_that_is_interrupted_and_then_killed_did_not_die(seconds: int) -> None:
    """Ctrl-C ends the ranks that run Python; torchrun kills those in C++ half a minute later."""
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    for log in logs:
        log.observation = Observation(
            End.KILLED, signal="SIGKILL", ended_ns=log.captured_ns + seconds * S
        )
    logs[2].exception = "KeyboardInterrupt"
    logs[2].observation = Observation(End.FAILED, 1, ended_ns=logs[2].captured_ns)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    assert not any(finding.kind == "dead" and finding.root_cause for finding in verdict.findings)
    if seconds:
        hold("missing/interrupted-and-killed-later", verdict)


def test_ranks_that_were_all_killed_in_one_moment_were_ended_from_outside() -> None:
    logs = Job(4).run(training(lambda *_: None)).logs()
    for log in logs:
        log.closed = False
        log.observation = Observation(End.KILLED, signal="SIGKILL", ended_ns=log.captured_ns)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("dead", [])
    hold("dead/all-killed-at-once", verdict)
