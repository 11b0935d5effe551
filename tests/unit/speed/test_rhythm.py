"""Rounds of jobs without optimizer steps, changes of the pace, and what comes periodically."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timezone

import msgspec
import pytest
from builders import MS, START, S
from paced_jobs import job

from commlens.diagnosis.examine import examine_logs
from commlens.model.cause import Straggler
from commlens.model.ranklog import RankLog
from commlens.speed.pace import (
    find_periodic_waits,
    find_slow_in_records,
    find_slow_ranks,
    measure,
)
from commlens.speed.rhythm import (
    find_change,
    find_period,
    longer_than_usual,
    round_starts,
    since,
)


def without_optimizer(logs: list[RankLog], op: str = "all_reduce") -> list[RankLog]:
    """The same job without optimizer steps; the first collective of a round is an ``op``."""
    for log in logs:
        log.steps = 0
        for each in log.collectives:
            each.step = 0
            if each.call_lines[0][1] == 10:
                each.args = msgspec.structs.replace(each.args, op=op)
    return logs


def late(rank: int, step: int) -> float:
    return 150.0 if rank == 2 else 100.0


def steps_of(times_ms: list[float]) -> list[tuple[int, int]]:
    """Steps from 100 on, and when they began."""
    found, now = [], START
    for number, ms in enumerate([*times_ms, 0.0]):
        found.append((100 + number, now))
        now += int(ms * MS)
    return found


def test_rounds_are_told_from_collectives() -> None:
    logs = without_optimizer(job(4, 200, late))
    assert len(round_starts(logs[0])) == 200
    verdict = examine_logs(logs, slow=True).verdict
    assert verdict.culprits == [2] and isinstance(verdict.cause, Straggler)
    assert verdict.cause.by_rounds and "In each round of 154 ms" in verdict.explanation
    assert round_starts(job(4, 200, late)[0]) == [], "an optimizer's steps are counted"


@pytest.mark.parametrize("op", ["broadcast", "scatter", "recv", "send"])
def test_ranks_that_wait_for_commands_are_not_judged(op: str) -> None:
    """Rank 0 gives them, and all others wait for it."""
    logs = without_optimizer(job(4, 200, lambda rank, _: 150.0 if rank == 0 else 1.0), op)
    assert round_starts(logs[1]) == []
    assert find_slow_in_records(logs) is None


def test_a_server_whose_requests_come_by_chance_has_no_rounds() -> None:
    draw = random.Random(1)
    pauses = [draw.expovariate(1 / 100) for _ in range(300)]
    logs = without_optimizer(job(4, 300, lambda rank, step: pauses[step] * (rank == 0)))
    assert round_starts(logs[0]) == []
    assert find_slow_in_records(logs) is None


def test_a_rank_that_waits_for_work_is_not_slow() -> None:
    """It asks for work ten times a second, and seldom gets any."""
    logs = without_optimizer(job(4, 400, lambda rank, _: 100.0 if rank == 0 else 1.0))
    assert round_starts(logs[0]), "it is regular"
    assert find_slow_in_records(logs) is None


def test_since_which_step_steps_take_longer() -> None:
    draw = random.Random(2)
    times = [draw.gauss(100, 5) for _ in range(120)] + [draw.gauss(131, 5) for _ in range(60)]
    times[40] = 5000.0  # a checkpoint
    change = find_change(steps_of(times))
    assert change is not None
    assert abs(change.step - 220) <= 2
    assert change.ratio == pytest.approx(1.31, abs=0.03)
    assert (change.since_ns - START) / S == pytest.approx(16.9, abs=0.5)


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_vary_have_not_changed(seed: int) -> None:
    draw = random.Random(seed)
    assert find_change(steps_of([draw.gauss(100, 8) for _ in range(300)])) is None
    assert find_change(steps_of([draw.gauss(100, 8) for _ in range(12)])) is None


def test_steps_of_one_moment_have_no_pace() -> None:
    assert find_change(steps_of([0.0] * 30 + [100.0] * 30)) is None


def every(number: int, extra: float) -> Callable[[int, int], float]:
    """Rank 0 takes longer in every so many steps."""
    return lambda rank, step: 100.0 + (extra if rank == 0 and step % number == number - 1 else 0.0)


def test_what_comes_periodically_is_told_with_its_period() -> None:
    moments = steps_of([1100.0 if step % 30 == 9 else 100.0 for step in range(200)])
    pause = find_period(moments, longer_than_usual(moments))
    assert pause is not None
    assert (pause.steps, pause.times, pause.newest) == (30, 7, 289)
    assert pause.seconds == pytest.approx(4.0)
    assert (pause.extra_s, pause.share) == (pytest.approx(1.0), pytest.approx(7 / 27))
    draw = random.Random(3)
    moments = steps_of([1100.0 if draw.random() < 0.03 else 100.0 for _ in range(200)])
    assert find_period(moments, longer_than_usual(moments)) is None, "by chance"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_with_a_periodic_task_is_not_slow(device: str) -> None:
    logs = job(4, 300, every(10, 400.0), device=device)
    whole = measure(logs)
    assert whole is not None
    slow = find_slow_ranks([whole] * 5)
    assert slow is not None and slow.ranks == [0], "the samples alone would name it"
    pause = find_periodic_waits(slow, logs)
    assert pause is not None and pause.steps == 10
    assert pause.extra_s == pytest.approx(0.4, abs=0.02)
    assert find_slow_in_records(logs) is None
    always = job(4, 300, lambda rank, _: 140.0 if rank == 0 else 100.0, device=device)
    assert find_periodic_waits(slow, always) is None


def test_a_time_of_day_is_the_one_closest_to_the_newest_record() -> None:
    """A dump of a job that has hung for half a day is captured on another day."""
    logs = job(2, 50, lambda rank, step: 100.0)
    middle = logs[0].collectives[50]
    at = datetime.fromtimestamp(middle.announced_ns / 1e9, timezone.utc)
    for log in logs:
        log.captured_ns += 13 * 3600 * S
    for when in (at.time(), at, middle.step):
        kept = since(logs, when)[0].collectives
        assert abs(len(kept) - 50) <= 1, when
    empty = [msgspec.structs.replace(log, collectives=[]) for log in logs]
    assert since(empty, at.time()) == empty
