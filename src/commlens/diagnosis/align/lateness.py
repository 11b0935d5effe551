"""The rank that arrives last, how late and how often, in a job that is not stuck.

Of the collectives 1 to 500 of a group, rank 3 came last to 320, for which the others waited 4.1 s
in all: from the moment when the second to last had come.

Arrival counts, not duration: a collective makes the ranks that wait look slow. Hosts' clocks
differ; since all ranks leave a collective together, the times at which they leave show by how much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
    if last - first + 1 < _MIN_COLLECTIVES:
        return []
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
    if int(known.sum()) < _MIN_COLLECTIVES:
        return []
    arrived = _corrected(arrived[:, known], gone[:, known])
    numbers = np.flatnonzero(known) + first
    order = np.sort(arrived, axis=0)
    late: Integers = order[-1] - order[-2]  # the last one after the second to last
    last_row = arrived.argmax(axis=0)
    found = []
    for row, rank in enumerate(ranks):
        mine = (last_row == row) & (late > _LATE_NS)
        if mine.any():
            worst = int(numbers[mine][late[mine].argmax()])
            found.append(
                Lateness(key, rank, int(mine.sum()), len(numbers), int(late[mine].sum()), worst)
            )
    return found


def _corrected(arrived: Integers, gone: Integers) -> Integers:
    """Correct the arrivals for clock offsets: the median difference between the ranks' times of
    leaving.

    A constant difference that remains, and is within the recorder's delay, is an error of the
    recorder.
    """
    offset = np.median(gone - np.median(gone, axis=0), axis=1)
    corrected = arrived - offset.astype("int64")[:, None]
    usual = np.median(corrected - np.median(corrected, axis=0), axis=1)
    usual = np.where(np.abs(usual) < _WATCHDOG_DELAY_NS, usual, 0)
    result: Integers = corrected - usual.astype("int64")[:, None]
    return result
