"""The limit that is learned from a job, on members and boxes that the tests make up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from builders import Job, S, training
from paced_jobs import ten_seconds_apart

from commlens.config import Settings
from commlens.errors import FormatError
from commlens.model.collective import Collective, State
from commlens.model.ranklog import RankLog
from commlens.watch.open_waits import OpenWait
from commlens.watch.stall_limit import FACTOR, FLOOR_S, StallLimit


def records(count: int = 16) -> list[Collective]:
    """Completed collectives of two lines, in turn, which took 40 ms."""
    ops = Job(2).run(training(lambda job, rank, step: None, count // 2)).logs()[0].collectives  # type: ignore[arg-type]
    return ten_seconds_apart(ops[:count], [0.04] * count)


class Rank:
    """A member whose box holds records; it may wait in the one after them."""

    def __init__(self, ops: Sequence[Collective], pid: int = 1) -> None:
        self.ops = list(ops)
        self.pid = pid
        self.reads = 0
        self.alive = True
        self.box: Any = self
        self.is_broken = False
        self.status: Any = SimpleNamespace(oldest_index=0, capacity=2000, issued=len(self.ops))

    def log(self, newest: int) -> RankLog:
        self.reads += 1
        if self.is_broken:
            raise FormatError("the box was cut off")
        return RankLog(0, 2, pid=self.pid, collectives=self.ops[-newest:])

    def wait(self, since_s: float, like: int) -> None:
        """Wait in a collective of the place where the record ``like`` was issued."""
        index = len(self.ops) + 1
        self.ops.append(
            msgspec.structs.replace(
                self.ops[like], index=index, state=State.ISSUED, done_ns=0, announced_ns=index * S
            )
        )
        self.status = SimpleNamespace(
            oldest_index=index, oldest_mono_ns=int(since_s * S), capacity=2000, issued=len(self.ops)
        )

    def go_on(self) -> None:
        self.status = SimpleNamespace(oldest_index=0, capacity=2000, issued=len(self.ops))


def follow(limit: StallLimit, rank: Rank, at_s: float, **options: int) -> float:
    """Returns the limit of the rank's wait; 0 if it is not known."""
    limit.follow([rank], int(at_s * S), **options)  # type: ignore[list-item]
    [wait] = limit.applied([OpenWait(0, rank.pid, "collective")])
    return wait.limit_s


def test_a_place_whose_collectives_are_short_has_the_lowest_limit() -> None:
    limit, rank = StallLimit(Settings()), Rank(records())
    rank.wait(100.0, like=0)
    assert follow(limit, rank, 101.0) == 0.0 and rank.reads == 0, "a short wait costs nothing"
    assert follow(limit, rank, 102.0) == FLOOR_S
    follow(limit, rank, 103.0)
    assert rank.reads == 1
    usual = limit.usual(rank.pid)
    assert usual is not None and (usual.times, usual.median_s, usual.longest_s) == (8, 0.04, 0.04)


def test_the_longest_wait_of_the_place_sets_the_limit() -> None:
    limit, rank = StallLimit(Settings()), Rank(records())
    rank.wait(100.0, like=0)
    follow(limit, rank, 105.0)
    rank.go_on()
    follow(limit, rank, 112.0)
    rank.wait(200.0, like=0)
    assert follow(limit, rank, 203.0) == FACTOR * 12.0
    rank.go_on()
    follow(limit, rank, 203.5)
    rank.wait(300.0, like=1)
    assert follow(limit, rank, 303.0) == FLOOR_S, "the other line is a place of its own"


def test_a_wait_in_the_first_step_teaches_nothing() -> None:
    limit, rank = StallLimit(Settings()), Rank(records())
    rank.wait(100.0, like=0)
    rank.ops[-1].step = 0
    assert follow(limit, rank, 130.0) == 0.0
    rank.go_on()
    follow(limit, rank, 131.0)
    rank.wait(200.0, like=0)
    assert follow(limit, rank, 203.0) == FLOOR_S


@pytest.mark.parametrize("count", [2, 4])
def test_a_new_place_has_no_limit(count: int) -> None:
    rank = Rank(records(count=count))
    rank.wait(100.0, like=0)
    assert follow(StallLimit(Settings()), rank, 103.0) == 0.0


def test_records_that_were_read_for_another_reason_count() -> None:
    limit, rank = StallLimit(Settings()), Rank(records(count=2))
    limit.add_records([RankLog(0, 2, pid=7, collectives=records())])
    rank.wait(100.0, like=0)
    assert follow(limit, rank, 103.0) == FLOOR_S


def test_a_pause_of_the_whole_job_is_no_wait() -> None:
    limit, rank = StallLimit(Settings()), Rank(records())
    rank.wait(100.0, like=0)
    follow(limit, rank, 103.0)
    follow(limit, rank, 500.0, resumed_ns=499 * S)
    rank.go_on()
    follow(limit, rank, 501.0)
    rank.wait(600.0, like=0)
    assert follow(limit, rank, 603.0) == FACTOR * 2.0


def test_a_box_that_cannot_be_read_has_no_limit() -> None:
    rank = Rank(records())
    rank.wait(100.0, like=0)
    rank.is_broken = True
    assert follow(StallLimit(Settings()), rank, 103.0) == 0.0


def test_after_an_error_nothing_is_learned_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit, rank = StallLimit(Settings()), Rank(records())
    rank.wait(100.0, like=0)
    rank.log = None  # type: ignore[assignment,method-assign]
    assert [follow(limit, rank, at_s) for at_s in (103.0, 104.0)] == [0.0, 0.0]
    limit.add_records([RankLog(0, 2)])
    assert len(caplog.records) == 1


def test_a_number_is_used_as_it_is() -> None:
    limit, rank = StallLimit(Settings(stall_timeout=60.0)), Rank(records())
    rank.wait(100.0, like=0)
    assert follow(limit, rank, 103.0) == 0.0 and rank.reads == 0
