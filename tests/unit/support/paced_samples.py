"""What the watcher measures of the jobs of paced_jobs.py."""

from __future__ import annotations

from itertools import pairwise

from builders import START

from commlens.model.ranklog import RankLog
from commlens.speed import pace
from commlens.speed.pace import Pace, find_slow_ranks, measure


def samples(logs: list[RankLog], number: int = 6, least: int = 2) -> list[Pace]:
    """What ``number`` samples of the job's time show."""
    begin, end = START, logs[0].captured_ns
    edges = [begin + (end - begin) * part // number for part in range(number + 1)]
    return [
        pace
        for first, last in pairwise(edges)
        if (pace := measure(logs, first, last, least=least)) is not None
    ]


def late(rank: int, step: int) -> float:
    return 150.0 if rank == 2 else 100.0


def found(logs: list[RankLog]) -> pace.SlowRanks:
    slow = find_slow_ranks(samples(logs))
    assert slow is not None
    return slow
