"""Find ranks that once issued collectives of one shape in another order than the others: only the
source lines show it.

Throughout the program, each line of the rank meets the same line of the others; here, for a few
collectives in a row, these lines meet in another order. Where a line legally meets several lines of
the others, nothing is reported. A swapped order is only a suspicion: a warning, never more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import msgspec

from commlens.diagnosis.align.out_of_step import keeps_routine, line_of
from commlens.diagnosis.align.tie_break import UNDECIDED, by_majority, by_routine
from commlens.diagnosis.index.job_index import JobIndex, Track
from commlens.model.collective import ChannelKey, Collective

_LONGEST = 16  # collectives in a row that can be in another order
_MET_BEFORE = 4  # times that two lines must have met


class SwappedOrder(msgspec.Struct):
    """From ``number`` on, ``rank`` issued the collectives of the others in another order."""

    rank: int
    number: int
    own: list[Collective]
    others: list[Collective]


def find_swapped_orders(job: JobIndex, key: ChannelKey) -> list[SwappedOrder]:
    """Return the swapped orders of a channel, by rank."""
    tracks = job.tracks_on(key)
    if len(tracks) < 2:
        return []
    # Compare all ranks with the first. If most differ from it in the same place, the first rank is
    # the odd one.
    base, *others = sorted(tracks)
    # the branch that swaps them may issue them from other lines, through the same functions
    for line in (line_of, _innermost_line):
        swaps = [
            swap
            for rank in others
            if (swap := _compare(rank, tracks[rank], tracks[base].ops, line)) is not None
        ]
        if swaps:
            break
    else:
        return []
    return _odd_of_two(job, base, swaps[0]) if len(tracks) == 2 else _odd(base, tracks, swaps)


def _odd_of_two(job: JobIndex, base: int, swap: SwappedOrder) -> list[SwappedOrder]:
    both = (swap, _from_the_other_side(base, swap))
    left = [one.rank for one in both if keeps_routine(job, one.rank, one.own[0]) is False]
    culprits, _ = by_routine([[one.rank] for one in both], left) or UNDECIDED
    return [one for one in both if one.rank in culprits]


def _odd(base: int, ranks: Iterable[int], swaps: Sequence[SwappedOrder]) -> list[SwappedOrder]:
    swapped = [swap.rank for swap in swaps]
    alike = [rank for rank in ranks if rank not in swapped]
    culprits, _ = by_majority([alike, swapped]) or UNDECIDED
    if culprits == (base,) and len({swap.number for swap in swaps}) == 1:
        return [_from_the_other_side(base, swaps[0])]
    return [swap for swap in swaps if swap.rank in culprits]


def _from_the_other_side(base: int, swap: SwappedOrder) -> SwappedOrder:
    return SwappedOrder(base, swap.number, swap.others, swap.own)


def _innermost_line(op: Collective) -> Hashable:
    return op.call_lines[:1] or None


def _compare(
    rank: int,
    track: Track,
    reference: Mapping[int, Collective],
    line_of: Callable[[Collective], Hashable],
) -> SwappedOrder | None:
    """Return the one stretch of collectives whose lines meet the reference's lines in another
    order, if there is exactly one.
    """
    numbers = sorted(set(track.ops) & set(reference))
    met = Counter((line_of(track.ops[number]), line_of(reference[number])) for number in numbers)
    usual = _usual_lines(met)
    if len(set(usual.values())) < len(usual):
        return None  # a line of the reference meets several of the rank
    odd = [
        number
        for number in numbers
        if usual[line_of(track.ops[number])] != line_of(reference[number])
    ]
    if not 2 <= len(odd) <= _LONGEST or odd[-1] - odd[0] != len(odd) - 1:
        return None  # not in a row: a line of the rank meets several of the reference
    own, others = [track.ops[number] for number in odd], [reference[number] for number in odd]
    if Counter(usual[line_of(op)] for op in own) != Counter(line_of(op) for op in others):
        return None
    if not all(map(_same_args, own, others)):
        return None  # a disagreement, or a shift
    if any(met[(line_of(op), usual[line_of(op)])] < _MET_BEFORE or op.concurrent for op in own):
        return None
    return SwappedOrder(rank, odd[0], own, others)


def _usual_lines(met: Counter[tuple[Hashable, Hashable]]) -> dict[Hashable, Hashable]:
    """Return, by line of a rank, the line of the reference that it meets most often."""
    usual: dict[Hashable, Hashable] = {}
    for (mine, theirs), _ in met.most_common():
        usual.setdefault(mine, theirs)
    return usual


def _same_args(mine: Collective, theirs: Collective) -> bool:
    return (mine.op, mine.step, mine.args.inputs) == (theirs.op, theirs.step, theirs.args.inputs)
