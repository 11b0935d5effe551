"""Find two threads of a rank that issue collectives of one group in any order.

The main thread issues an all_reduce, and a checkpoint's thread an all_gather_object, both in the
default group. Rank 0's main thread comes first, rank 1's second: so the ranks disagree under this
number, and in the next run they may not. No rank is to blame, but the program, which should give
one of the threads a group of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.matching.answer import Disagree
from commlens.model.collective import ChannelKey, Collective

_NEAR = 8  # numbers before and after a disagreement among which threads may race
_RANKS_OF_A_SIDE = 16  # whose records are looked at

_Lines = Hashable
"""The user's lines that issued a collective; in a library's thread, all of its lines."""
_Overlaps = Mapping[frozenset[_Lines], tuple[Collective, Collective]]
"""Of one rank, pairs of collectives that two threads had in flight at once, by the lines of both.
The one of the main thread is the second.
"""


class Race(NamedTuple):
    """Two collectives of one group that two threads issue in any order."""

    other: Collective  # issued by a thread beside the main one
    main: Collective
    ranks: tuple[int, ...]  # that had collectives of both threads in flight at once


def find_race(
    job: JobIndex, key: ChannelKey, number: int, met: Mapping[int, Collective], answer: Disagree
) -> Race | None:
    """Return the race of two threads because of which ranks disagree; None if it is not known to
    be one.

    Either ranks of both sides had collectives from the same two lines in flight at once. Or what
    differs is the thread that came first: on one side the main thread, on the other side a
    library's thread, or one that at least half of the ranks run and that was seen beside the main
    thread.

    Args:
        job: the indexed ranks.
        key: the channel.
        number: under which they disagree.
        met: their collectives there, by rank.
        answer: how they disagree.
    """
    sides = [
        [rank for rank in party.ranks[:_RANKS_OF_A_SIDE] if rank in job.views]
        for party in answer.parties[:2]
    ]
    near = {rank: _ops_near(job.views[rank], key, number) for side in sides for rank in side}
    seen = {rank: _overlaps(job.views[rank], ops) for rank, ops in near.items()}
    ranks = tuple(sorted(rank for rank, pairs in seen.items() if pairs))
    both = _in_flight_on_all_sides(sides, seen)
    if both is not None:
        return Race(*both, ranks)
    main, beside = _by_thread(job, near, met)
    if not (beside and main):
        return None
    # a library's thread runs on all ranks, perhaps later
    if all(map(_is_of_library, beside)) or _runs_beside_main(job, near, seen, beside):
        return Race(beside[0], main[0], ranks)
    return None


def has_overlaps(view: RankView, key: ChannelKey, number: int) -> bool:
    """Return whether two threads of a rank had collectives near a number in flight at once."""
    return bool(_overlaps(view, _ops_near(view, key, number)))


def _ops_near(view: RankView, key: ChannelKey, number: int) -> list[Collective]:
    """Return a rank's collectives near a number; none of a dump, which does not record threads."""
    track = view.tracks.get(key)
    if track is None or view.dump is not None:
        return []
    ops = (track.ops.get(n) for n in range(number - _NEAR, number + _NEAR))
    return [op for op in ops if op is not None and op.stack]


def _overlaps(view: RankView, ops: Sequence[Collective]) -> _Overlaps:
    """Return the pairs of these collectives that two Python threads had in flight at once."""
    found = {}
    for own, other in combinations(ops, 2):
        if own.issue_thread != other.issue_thread and _is_inside(own, other.announced_ns):
            lines = frozenset((_lines_of(own), _lines_of(other)))
            found[lines] = (other, own) if _is_of_main(view, own) else (own, other)
    return found


def _is_inside(op: Collective, at_ns: int) -> bool:
    """Return whether the thread that issued a collective was inside its call, or inside the wait
    for it, at a time.
    """
    spans = [(op.announced_ns, op.returned_ns)]
    if op.wait_began_ns and op.wait_thread == op.issue_thread:
        spans.append((op.wait_began_ns, op.wait_ended_ns))
    return any(began <= at_ns and (not ended or at_ns < ended) for began, ended in spans)


def _in_flight_on_all_sides(
    sides: Sequence[Sequence[int]], seen: Mapping[int, _Overlaps]
) -> tuple[Collective, Collective] | None:
    """Return two collectives from lines that ranks of every side had in flight at once."""
    of_sides = [set().union(*(seen[rank] for rank in side)) for side in sides]
    found = (
        pair
        for pairs in seen.values()
        for lines, pair in pairs.items()
        if all(lines in side for side in of_sides)
    )
    return next(found, None)


def _by_thread(
    job: JobIndex, ranks: Iterable[int], met: Mapping[int, Collective]
) -> tuple[list[Collective], list[Collective]]:
    """Return the collectives that main threads issued, and those that other threads did."""
    issued = [(met[rank], _is_of_main(job.views[rank], met[rank])) for rank in ranks if rank in met]
    return [op for op, of_main in issued if of_main], [op for op, of_main in issued if not of_main]


def _is_of_main(view: RankView, op: Collective) -> bool:
    return op.issue_thread == view.main_thread


def _is_of_library(op: Collective) -> bool:
    """Return whether a library's own thread issued an op, without a line of the user's."""
    # threads of the backward pass are ordered by the main thread
    return not op.call_lines and any(
        frame.file.endswith(("/threading.py", "/concurrent/futures/thread.py"))
        for frame in op.stack
    )


def _lines_of(op: Collective) -> _Lines:
    return op.call_lines or tuple((frame.file, frame.line) for frame in op.stack)


def _runs_beside_main(
    job: JobIndex,
    near: Mapping[int, Sequence[Collective]],
    seen: Mapping[int, _Overlaps],
    beside: Sequence[Collective],
) -> bool:
    """Return whether at least half of the ranks run a thread that issues collectives from the lines
    of one of those ``beside`` the main thread, and a rank had such a one in flight with one of the
    main thread.

    Args:
        job: the indexed ranks.
        near: by rank, the collectives near the disagreement.
        seen: by rank, those of them that overlap.
        beside: the collectives on which ranks disagree that no main thread issued.
    """
    lines = set(map(_lines_of, beside))
    running = [
        rank
        for rank, ops in near.items()
        if any(not _is_of_main(job.views[rank], op) and _lines_of(op) in lines for op in ops)
    ]
    pairs = [pair for each in seen.values() for pair in each.values()]
    overlapped = any(_lines_of(other) in lines for other, _ in pairs)
    return overlapped and len(running) * 2 >= len(near)
