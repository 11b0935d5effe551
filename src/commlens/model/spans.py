"""Spans of time, as pairs of begin and end: their union, what two lists of them have in common, and
how much of a span others cover.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Begin and end."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same time and do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> int:
    """Return the sum of the spans' lengths."""
    return sum(end - begin for begin, end in spans)


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """Return the spans that both cover. Each of them is a :func:`union`."""
    found: list[Span] = []
    one, other = 0, 0
    while one < len(first) and other < len(second):
        begin, end = max(first[one][0], second[other][0]), min(first[one][1], second[other][1])
        if begin < end:
            found.append((begin, end))
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return found


def covered(spans: Sequence[Span], start: int, end: int) -> int:
    """Return how much of the span from ``start`` to ``end`` a :func:`union` covers."""
    at = max(0, bisect.bisect_right(spans, (start, 0)) - 1)
    found = 0
    for begin, stop in map(spans.__getitem__, range(at, len(spans))):
        if begin >= end:
            break
        found += max(0, min(stop, end) - max(begin, start))
    return found
