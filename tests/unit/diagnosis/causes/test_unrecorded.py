"""Ranks that others wait for, and of which no record tells what they did."""

from __future__ import annotations

import pytest
from builders import SCRIPT, START, Job, S, Stay, at, training
from goldens import hold
from judging import blame, judge
from starting_ranks import WORLD, init, rank, verdict

from commlens.model.ranklog import RankLog
from commlens.reports.terminal import render

SLEEP = Stay(57, "load_batch")


@pytest.mark.parametrize("readable", [0, 6])
def test_a_rank_whose_newest_records_are_unreadable_may_have_arrived(readable: int) -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    logs[1].collectives = logs[1].collectives[:readable]
    logs[1].problems = ["the others are damaged"]
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")


def test_nobody_is_blamed_because_its_newest_records_are_unreadable() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    logs[2].collectives = logs[2].collectives[:5]
    verdict = judge(logs)
    assert (verdict.culprits, verdict.confidence) == ([], "low")
    assert verdict.cause.reason == "unreadable"
    hold("missing/newest-records-unreadable", verdict)


def test_a_rank_without_a_log_among_others_left_no_record() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    verdict = judge([log for log in logs if log.rank != 2])
    assert (verdict.kind, verdict.culprits) == ("dead", [2])
    assert any("left no record" in text for text in verdict.missing_evidence)
    assert render(verdict).count("left no record") == 1
    hold("dead/left-no-record", verdict)


def test_another_nodes_ranks_are_not_known() -> None:
    logs = Job(8).run(training(at(6, 5, SLEEP))).logs()
    verdict = judge(logs[:4])
    assert (verdict.confidence, verdict.culprits) == ("low", [])
    assert verdict.cause.reason == "out-of-sight"
    hold("missing/another-nodes-ranks", verdict)


def test_a_rank_of_which_there_is_no_record() -> None:
    found = verdict(rank(0, init()), rank(1, init()), rank(3, init()))
    assert (found.is_fault, found.culprits) == (True, [2])
    hold("dead/no-record-before-init", found)


def test_a_rank_that_runs_here_without_being_recorded() -> None:
    """Nobody knows what it does, but it is not on another node."""
    stranger = RankLog(
        1,
        WORLD,
        "job-1",
        "n03",
        1001,
        unrecorded="COMMLENS=1 is not in its environment: start it with COMMLENS=1",
    )
    waiting = [rank(number, init(), inside=False, issued="all_reduce") for number in (0, 2, 3)]
    found = verdict(*waiting, stranger)
    assert (found.kind, found.culprits, found.confidence) == ("missing", [1], "low")
    assert found.cause.reason == "not-recorded"
    hold("missing/not-recorded", found)


def test_ranks_that_were_never_started() -> None:
    """All meet at an address that only this machine reaches, and nobody else came."""

    def waiting(number: int, meeting: str, **more: object) -> RankLog:
        log = RankLog(
            number,
            WORLD,
            "job-1",
            "n03",
            1000 + number,
            None,
            script=SCRIPT,
            captured_ns=START + 60 * S,
            **more,
        )  # type: ignore[arg-type]
        return rank(number, init(asked=meeting), log=log)

    for origin, known, launcher in (
        ("variable", 4, ""),
        ("launcher", 4, "torchrun"),
        ("call", 2, "torchrun"),
        ("unknown", None, ""),
    ):
        here = [
            waiting(number, "tcp://127.0.0.1:29500", launcher=launcher, size_in_environment=known)
            for number in (0, 1)
        ]
        found = verdict(*here)
        assert (found.cause.reason, found.culprits) == ("not-started", [])
        hold(f"missing/never-started-size-from-{origin}", found)
    elsewhere = verdict(
        *(
            waiting(number, "tcp://node7:29500", launcher="", size_in_environment=4)
            for number in (0, 1)
        )
    )
    assert elsewhere.cause.reason == "fewer-than-expected"
    hold("missing/fewer-ranks-than-expected", elsewhere)
