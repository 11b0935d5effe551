"""Decide between sides: ranks that did different things where all should have done the same.

Each function looks at one kind of evidence, and returns the ranks to blame, or None if this
evidence does not decide. It gets the sides and the evidence as data; other modules collect them
from the records. :func:`first_decision` asks one kind of evidence after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from commlens.model.cause import BlamedBy, Decision
from commlens.model.collective import Collective

Ranks = Sequence[int]
UNDECIDED = Decision((), "undecided")


def first_decision(*ways: Callable[[], Decision | None]) -> Decision:
    """Return the first decision that one of these functions makes; undecided if none does."""
    return next((decision for way in ways if (decision := way()) is not None), UNDECIDED)


def is_majority(count: int, of: int) -> bool:
    """Return whether ``count`` ranks are more than half of all."""
    return count * 2 > of


def by_majority(sides: Sequence[Ranks], *, of: int | None = None) -> Decision | None:
    """Blame all sides but the one that holds most ranks.

    Args:
        sides: the ranks of each side.
        of: the number of ranks that have a vote, if some of them are on no side.
    """
    voters = sum(map(len, sides)) if of is None else of
    largest = max(sides, key=len, default=())
    if not is_majority(len(largest), voters):
        return None
    return _blame_others(sides, largest, "majority")


def by_arguments(wrong: Collection[int]) -> Decision | None:
    """Blame the ranks whose own arguments are wrong, whatever the others pass."""
    return _decision(wrong, "arguments") if wrong else None


def by_other_groups(sides: Sequence[Ranks], like_others: Sequence[Ranks]) -> Decision | None:
    """Blame all sides but the one that did what the other groups of this kind do.

    Args:
        sides: the ranks of each side, which are all in one group.
        like_others: the sides that did what all other groups do.
    """
    if len(like_others) != 1:
        return None
    return _blame_others(sides, like_others[0], "other-groups")


def by_rounds(ranks: Collection[int], odd: Iterable[Collection[int]]) -> Decision | None:
    """Blame the ranks that came to each of several lines more or less often than most ranks of the
    job.

    Args:
        ranks: those of both sides.
        odd: for each line, the ranks that did not come to it as often as most.
    """
    lines = list(odd)
    culprits = set(ranks).intersection(*lines) if lines else set()
    return _decision(culprits, "rounds") if culprits and culprits != set(ranks) else None


def by_routine(
    sides: Sequence[Ranks],
    left: Collection[int],
    been_here: Callable[[int], bool] | None = None,
) -> Decision | None:
    """If all ranks of exactly one side keep to their earlier order, blame the other sides.

    Args:
        sides: the ranks of each side.
        left: the ranks that leave their routine.
        been_here: whether a rank was here before. Several ranks that are all in a new place are
            not blamed, because the others may be wrong to stay away.
    """
    kept = [side for side in sides if not set(left).intersection(side)]
    if not left or len(kept) != 1:
        return None
    decision = _blame_others(sides, kept[0], "routine")
    if decision is None or been_here is None or len(decision.culprits) == 1:
        return decision
    return decision if any(map(been_here, decision.culprits)) else None


def by_midway(
    ended: Ranks, waiting: Ranks, midway: Collection[int], going_on: Collection[int]
) -> Decision | None:
    """Blame ranks that ended in the middle of a repeated sequence, while the others wait in it.

    Args:
        ended: the ranks that ended.
        waiting: the ranks that wait for them.
        midway: the ranks whose last op is not the end of a round.
        going_on: the ranks whose last op continues what they repeat.
    """
    if not set(ended) <= set(midway) or not set(waiting) <= set(going_on):
        return None
    return _decision(ended, "midway")


def by_order(reordered: Collection[int], left: Collection[int]) -> Decision | None:
    """Blame the ranks that leave the order in which most of their peers use their groups.

    Args:
        reordered: the ranks that do so.
        left: those of them that leave their own routine at the same place.
    """
    if not reordered:
        return None
    return _decision(reordered, "routine" if set(reordered) <= set(left) else "majority")


def by_own_routine(left: Collection[int], *, of: int) -> Decision | None:
    """Blame the ranks that leave their routine, unless most do: then these may all be right.

    Args:
        left: the ranks that do so.
        of: the number of ranks that they are compared with, themselves included.
    """
    return _decision(left, "routine") if left and not is_majority(len(left), of) else None


def sides_of(ops: Mapping[int, Collective]) -> list[list[int]]:
    """Group the ranks whose ops are alike: same op, peer and line, and groups of the same label;
    the largest side first.
    """
    sides: dict[Hashable, list[int]] = defaultdict(list)
    for rank, op in sorted(ops.items()):
        group, source = op.channel.group, op.source
        line = (source.where, source.function) if source is not None else None
        kind = group.label if group.label != group.name else len(group.ranks)
        sides[op.op, op.peer, kind, line].append(rank)
    return sorted(sides.values(), key=lambda ranks: (-len(ranks), ranks))


def _blame_others(sides: Sequence[Ranks], right: Ranks, by: BlamedBy) -> Decision | None:
    others = {rank for side in sides if side is not right for rank in side}
    return _decision(others, by) if others else None


def _decision(culprits: Iterable[int], by: BlamedBy) -> Decision:
    return Decision(tuple(sorted(culprits)), by)
