"""The rank that arrives last, how late and how often, in a job that is not stuck.

Of the collectives 1 to 500 of a group, rank 3 came last to 320, for which the others waited 4.1 s
in all: from the moment when the second to last had come.

Arrival counts, not duration: a collective makes the ranks that wait look slow. Hosts' clocks
differ; since all ranks leave a collective together, the times at which they leave show by how much,
but for the recorder's delay. So a rank that is always late by less than that delay is not found.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from commlens.diagnosis.index.columns import ColumnOps
from commlens.diagnosis.index.job_index import JobIndex
from commlens.formats.columns import Integers
from commlens.model.collective import ChannelKey

_MIN_COLLECTIVES = 3  # of a group, to judge arrivals
_LATE_NS = 5_000_000  # less is noise of the clocks and of the recorder
_WATCHDOG_DELAY_NS = 100_000_000  # the watchdog notices completions at most this late


class Lateness(NamedTuple):
    """How late one rank comes to one group's collectives."""

    key: ChannelKey
    rank: int
    times: int  # collectives to which it came last, and late
    of: int  # collectives
    lost_ns: int  # the others waited for it alone
    worst: int  # number of the collective to which it came latest
    unlikely: float
    """``exp(-unlikely)`` is the highest probability with which chance makes it late so often."""


def lateness(job: JobIndex) -> list[Lateness]:
    """Return the ranks of every group that came last and late, sorted by the time lost."""
    found: list[Lateness] = []
    for key in sorted(job.users):
        tracks = {rank: job.views[rank].tracks[key].ops for rank in job.users[key]}
        columns = {rank: ops for rank, ops in tracks.items() if isinstance(ops, ColumnOps)}
        if len(columns) == len(key[2]) > 1:
            found += _of_group(key, columns)
    return sorted(found, key=lambda one: (-one.lost_ns, one.rank, one.key))


def _of_group(key: ChannelKey, columns: dict[int, ColumnOps]) -> list[Lateness]:
    first = max(int(ops.numbers[0]) for ops in columns.values())
    last = min(int(ops.numbers[-1]) for ops in columns.values())
    ranks = sorted(columns)
    came, left = [], []  # a row for each rank, with a time for each collective
    for rank in ranks:
        ops = columns[rank]
        begin, end = np.searchsorted(ops.numbers, [first, last + 1])
        if end - begin != last - first + 1:
            return []
        rows = ops.rows[begin:end]
        came.append(ops.columns.dump.created_ns[rows])
        left.append(ops.columns.dump.completed_ns[rows])
    arrived, gone = np.array(came), np.array(left)
    known = (arrived > 0).all(axis=0) & (gone > 0).all(axis=0)
    numbers = np.flatnonzero(known) + first
    if len(numbers) < _MIN_COLLECTIVES:
        return []
    # A constant difference between arrivals is lateness, or an error of the recorder: it notices
    # all completions of a rank late. Count the time by which a rank is late in both cases.
    by_clocks = arrived[:, known] - _usual(gone[:, known])
    usual = _usual(by_clocks)
    corrected = by_clocks - np.where(np.abs(usual) < _WATCHDOG_DELAY_NS, usual, 0)
    late = np.minimum(_behind_others(by_clocks), _behind_others(corrected))
    is_late = late > _LATE_NS
    # later than the mean: rank 1 may be late as often as the others, but by ten times as much
    is_very_late = is_late & (late >= late.mean(where=is_late)) if is_late.any() else is_late
    found = []
    for row, rank in enumerate(ranks):
        mine, times = late[row], is_late[row]
        if times.any():
            worst = int(numbers[mine.argmax()])
            lost = int(mine[times].sum())
            unlikely = max(_unlikely(is_late, row), _unlikely(is_very_late, row))
            found.append(Lateness(key, rank, int(times.sum()), len(numbers), lost, worst, unlikely))
    return found


def _unlikely(is_late: NDArray[np.bool_], row: int) -> float:
    """Return ``x`` if chance gives a rank as many of the late arrivals of all ranks with a
    probability of at most ``exp(-x)``; 0 if it has no more than its part.

    Of ranks that are equally fast, each is the late one equally often: the number of times is
    binomial, and Chernoff's bound holds for it.
    """
    times, of, fair = int(is_late[row].sum()), int(is_late.sum()), 1 / len(is_late)
    if times <= of * fair:
        return 0.0
    rest = (of - times) * log((1 - times / of) / (1 - fair)) if times < of else 0.0
    return times * log(times / of / fair) + rest


def _usual(moments: Integers) -> Integers:
    """Return by how much each rank (a row) is usually after the middle rank: of two, the first."""
    middle = np.quantile(moments, 0.5, axis=0, method="lower")
    usual: Integers = np.median(moments - middle, axis=1, keepdims=True).astype("int64")
    return usual


def _behind_others(arrived: Integers) -> Integers:
    """Return how long after all others each rank came to each collective; 0 or less if it was not
    the last.
    """
    second, last = np.partition(arrived, -2, axis=0)[-2:]
    behind: Integers = arrived - np.where(arrived == last, second, last)
    return behind
