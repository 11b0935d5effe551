"""Compare ranks' columns: find the few sequence numbers worth comparing, and the few ranks that
represent all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from commlens.diagnosis.index.columns import ColumnOps
from commlens.diagnosis.index.job_index import Track
from commlens.formats.columns import Integers

_NUMBERS_MAX = 256  # of one channel: later differences follow from the first one
_RANKS_OF_A_KIND = 3  # that represent all ranks with equal ops and lines
_KINDS_MAX = 24


def differing_numbers(tracks: Mapping[int, Track]) -> list[int]:
    """Return the sequence numbers under which ranks' arguments differ, ascending. Linear in the
    records.
    """
    columns = [track.ops for track in tracks.values() if isinstance(track.ops, ColumnOps)]
    found: set[int] = set()
    if len(columns) < 2:
        return []
    values = [ops.signatures() for ops in columns]
    # Compare all ranks with the longest, and with the first: a number that only the longest has
    # would be compared with nothing.
    longest = max(range(len(columns)), key=lambda i: (len(columns[i]), -i))
    for base in {longest, 0}:
        for ops, value in zip(columns, values, strict=True):
            if ops is not columns[base]:
                found.update(
                    _differing(columns[base].numbers, values[base], ops.numbers, value).tolist()
                )
    return sorted(found)[:_NUMBERS_MAX]


def representatives(tracks: Mapping[int, Track]) -> dict[int, Track]:
    """Return a few ranks of each kind, where ops or lines differ between ranks; none if all are
    equal.
    """
    columns = {
        rank: track.ops for rank, track in tracks.items() if isinstance(track.ops, ColumnOps)
    }
    if len(columns) < 2:
        return {}
    first = max(int(ops.numbers[0]) for ops in columns.values())
    last = min(int(ops.numbers[-1]) for ops in columns.values())
    kinds: dict[bytes, list[int]] = {}
    for rank, ops in sorted(columns.items()):
        begin, end = np.searchsorted(ops.numbers, [first, last + 1])
        value = ops.tokens()
        kinds.setdefault(
            value[begin:end].tobytes() if first <= last else value.tobytes(), []
        ).append(rank)
    if len(kinds) < 2:
        return {}
    largest = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
    return {
        rank: tracks[rank] for ranks in largest[:_KINDS_MAX] for rank in ranks[:_RANKS_OF_A_KIND]
    }


def _differing(
    numbers: Integers, values: Integers, other_numbers: Integers, other_values: Integers
) -> Integers:
    """Return the numbers that both ranks have, with different values."""
    if _is_dense(numbers) and _is_dense(other_numbers):
        first, last = (
            max(int(numbers[0]), int(other_numbers[0])),
            min(int(numbers[-1]), int(other_numbers[-1])),
        )
        if first > last:
            return numbers[:0]
        mine = values[first - int(numbers[0]) : last - int(numbers[0]) + 1]
        theirs = other_values[first - int(other_numbers[0]) : last - int(other_numbers[0]) + 1]
        dense: Integers = np.flatnonzero(mine != theirs) + first
        return dense
    common, at, other_at = np.intersect1d(
        numbers, other_numbers, assume_unique=True, return_indices=True
    )
    found: Integers = common[values[at] != other_values[other_at]]
    return found


def _is_dense(numbers: Integers) -> bool:
    return len(numbers) > 0 and int(numbers[-1]) - int(numbers[0]) + 1 == len(numbers)
