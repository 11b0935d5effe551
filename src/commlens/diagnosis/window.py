"""Where ranks' columns differ: the few numbers that are worth a comparison, and the few ranks that stand for all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from commlens.diagnosis.columns import ColumnOps, Integers
from commlens.diagnosis.index import Track

_NUMBERS = 256  # looked at on one channel: what goes wrong later follows from what went wrong first
_ALIKE = 3  # ranks that stand for all of their kind
_KINDS = 24


def differing(tracks: Mapping[int, Track]) -> list[int]:
    """Numbers under which not all ranks asked for the same, ascending. Linear in the records."""
    columns = [track.ops for track in tracks.values() if isinstance(track.ops, ColumnOps)]
    found: set[int] = set()
    if len(columns) < 2:
        return []
    values = [ops.signatures() for ops in columns]
    # All are held against one that reaches furthest, and against the first to be sure that it is not the only one there.
    for base in {_longest(columns), 0}:
        for ops, value in zip(columns, values, strict=True):
            if ops is not columns[base]:
                found.update(_different(columns[base].numbers, values[base], ops.numbers, value).tolist())
    return sorted(found)[:_NUMBERS]


def different(tracks: Mapping[int, Track]) -> dict[int, Track]:
    """Ranks that stand for all, where ops or lines differ; none where all are the same."""
    mine = {rank: track.ops for rank, track in tracks.items() if isinstance(track.ops, ColumnOps)}
    if len(mine) < 2:
        return {}
    first = max(int(ops.numbers[0]) for ops in mine.values())
    last = min(int(ops.numbers[-1]) for ops in mine.values())
    kinds: dict[bytes, list[int]] = {}
    for rank, ops in sorted(mine.items()):
        begin, end = np.searchsorted(ops.numbers, [first, last + 1])
        value = ops.tokens()
        kinds.setdefault(value[begin:end].tobytes() if first <= last else value.tobytes(), []).append(rank)
    if len(kinds) < 2:
        return {}
    largest = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
    return {rank: tracks[rank] for ranks in largest[:_KINDS] for rank in ranks[:_ALIKE]}


def _longest(columns: list[ColumnOps]) -> int:
    return max(range(len(columns)), key=lambda i: (len(columns[i]), -i))


def _different(numbers: Integers, values: Integers, other_numbers: Integers, other_values: Integers) -> Integers:
    """Numbers that both have, with other values."""
    if _is_dense(numbers) and _is_dense(other_numbers):
        first, last = max(int(numbers[0]), int(other_numbers[0])), min(int(numbers[-1]), int(other_numbers[-1]))
        if first > last:
            return numbers[:0]
        mine = values[first - int(numbers[0]) : last - int(numbers[0]) + 1]
        theirs = other_values[first - int(other_numbers[0]) : last - int(other_numbers[0]) + 1]
        different_at: Integers = np.flatnonzero(mine != theirs) + first
        return different_at
    common, at, other_at = np.intersect1d(numbers, other_numbers, assume_unique=True, return_indices=True)
    found: Integers = common[values[at] != other_values[other_at]]
    return found


def _is_dense(numbers: Integers) -> bool:
    return len(numbers) > 0 and int(numbers[-1]) - int(numbers[0]) + 1 == len(numbers)
