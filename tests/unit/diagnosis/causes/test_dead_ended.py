"""Jobs that were ended from outside, or by what an earlier start left."""

from __future__ import annotations

import pytest
import starting_ranks
from builders import START, Job, S, Stay, at, training
from goldens import hold
from judging import judge

from commlens.model.cause import Ended
from commlens.model.collective import State
from commlens.model.ranklog import End, Observation, RankLog

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


@pytest.mark.parametrize(("launcher", "named"), [("torchrun", []), ("deepspeed", [0])])
def test_ranks_that_torchrun_kills_one_after_the_other_were_ended_from_outside(
    launcher: str, named: list[int]
) -> None:
    """Each takes two seconds to end. DeepSpeed's launcher kills the others because one was
    killed.
    """
    logs = Job(4).run(training(lambda *_: None)).logs()
    for log in logs:
        log.closed, log.launcher = False, launcher
        log.observation = Observation(
            End.KILLED, signal="SIGKILL", ended_ns=log.captured_ns + 2 * log.rank * S
        )
    verdict = judge(logs)
    assert verdict.kind == "dead"
    assert verdict.culprits[:1] == named


REFUSED = (
    "RuntimeError: Gloo connectFullMesh failed with [/pytorch/gloo/transport/tcp/pair.cc:152] timed"
    " out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:17304$0"
)


def refused(number: int, *, restart: int = 1, life: int = 1, text: str = REFUSED) -> RankLog:
    """A rank that init_process_group raised an error on."""
    log = starting_ranks.rank(number, starting_ranks.init(number=life, inc=life - 1))
    log.setups[-1].state = State.FAILED
    log.restart, log.exception, log.closed = restart, text, True
    log.observation = Observation(End.FAILED, 1, ended_ns=START + 20 * S)
    return log


def late(number: int, restart: int) -> RankLog:
    log = starting_ranks.rank(number, at=57)
    log.restart = restart
    return log


@pytest.mark.parametrize(("restart", "life"), [(1, 1), (3, 1), (0, 2)])
def test_an_address_that_the_store_kept(restart: int, life: int) -> None:
    logs = [refused(number, restart=restart, life=life) for number in (0, 1)]
    found = starting_ranks.verdict(*logs, late(2, restart), late(3, restart))
    assert isinstance(found.cause, Ended)
    assert (found.cause.how, found.culprits) == ("kept-address", [])
    assert found.cause.addresses == ["127.0.0.1:17304"]
    assert [each.culprits for each in found.findings if each.root_cause] == [[]]
    hold(f"dead/kept-address-{restart}-{life}", found)


def test_an_address_of_a_rank_that_died_is_not_a_kept_one() -> None:
    died = refused(2, text="ValueError: bad sample")
    found = starting_ranks.verdict(refused(0), refused(1), died, refused(3))
    assert (found.kind, found.culprits) == ("dead", [2])
    first = starting_ranks.verdict(*(refused(number, restart=0) for number in range(4)))
    assert not isinstance(first.cause, Ended) or first.cause.how != "kept-address"
