"""Find the part of the cluster that all affected ranks share, and none of the others: a host, a
leaf switch, a rack, a rail, or the index of a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.index.whereabouts import Whereabouts, whereabouts
from commlens.model.cause import AnyCause, Dead, PlaceKind, SharedPlace, StuckInside

_KINDS: Final[Sequence[PlaceKind]] = ("host", "leaf", "rack", "rail", "gpu")
"""The first that fits is named."""

_OF_HOSTS: Final[Collection[PlaceKind]] = ("leaf", "rack")


class Affected(NamedTuple):
    """The ranks that a fault affects, and those that were examined and are well."""

    bad: Collection[int]
    good: Collection[int]
    by_node: bool = False  # all ranks of a node count, because of what happened there


def add_shared_places(context: Context) -> None:
    """Add to each root cause the place that its ranks share.

    Where ranks stand for others, which have no log, the places of these are not known.
    """
    if context.job.stands_for:
        return
    logs = {rank: view.log for rank, view in context.job.views.items()}
    dead = {
        rank
        for case in context.cases
        if isinstance(case.found.cause, Dead)
        for rank in (*case.found.cause.ranks, *case.found.cause.ended_by_it)
    }
    where: dict[int, Whereabouts] | None = None
    for case in context.cases:
        cause = case.found.cause
        if not case.claim.root_cause or not isinstance(cause, (Dead, StuckInside)):
            continue
        affected = affected_by(cause, set(logs) - dead)
        if len(affected.bad) > 1 and affected.good:
            where = where or whereabouts(logs, context.job.nodes, context.job.inventory)
            cause.place = shared_place(affected, where)


def affected_by(cause: AnyCause, alive: Collection[int]) -> Affected:
    """Return the ranks that a cause affects, and those that it does not although it could.

    Args:
        cause: what was found.
        alive: the ranks that run, as far as was seen.
    """
    match cause:
        case Dead():
            return Affected(cause.ranks, [rank for rank in alive if rank not in cause.ranks])
        case StuckInside():
            bad = _stuck(cause)
            by_node = any(each.explains and not each.own for each in cause.hardware)
            return Affected(bad, set(cause.ranks) - set(bad), by_node)
    return Affected([], [])


def _stuck(cause: StuckInside) -> Collection[int]:
    """Return the ranks of a collective that differ from the others of it."""
    if cause.culprits:
        return cause.culprits
    first = cause.hardware[0] if cause.hardware else None
    if first is not None and first.explains:
        same = [each for each in cause.hardware if each.event.what == first.event.what]
        return {rank for each in same for rank in each.ranks} & set(cause.ranks)
    return set(cause.ranks) - set(cause.completed_on) if cause.completed_on else []


def shared_place(affected: Affected, where: Mapping[int, Whereabouts]) -> SharedPlace | None:
    """Return the smallest place that all affected ranks share and none of the others; None if there
    is none, or one of the affected ranks may be elsewhere.

    Args:
        affected: two ranks or more, and others.
        where: where the ranks run.
    """
    bad = sorted(set(affected.bad))
    good = sorted(set(affected.good) - set(bad))
    kinds = _KINDS[1:] if affected.by_node else _KINDS
    found = (_shared(kind, bad, good, where) for kind in kinds) if len(bad) > 1 else ()
    return next((place for place in found if place is not None), None)


def _shared(
    kind: PlaceKind, bad: Sequence[int], good: Sequence[int], where: Mapping[int, Whereabouts]
) -> SharedPlace | None:
    """Return the place of this kind."""
    ours = {_named(where, rank, kind) for rank in bad}
    name = next(iter(ours))
    theirs = [rank for rank in good if _named(where, rank, kind)]
    if len(ours) > 1 or not name or not theirs:
        return None
    if any(_named(where, rank, kind) == name for rank in theirs):
        return None
    if kind in _OF_HOSTS and len({where[rank].host for rank in bad}) < 2:
        return None  # the only host there
    nics = {where[rank].nic for rank in bad}
    nic = next(iter(nics)) if kind == "rail" and len(nics) == 1 else ""
    chance = _chance(kind, [*bad, *theirs], bad, where)
    return SharedPlace(kind, name, list(bad), len(theirs), round(chance, 4), nic)


def _named(where: Mapping[int, Whereabouts], rank: int, kind: PlaceKind) -> str:
    return str(getattr(where.get(rank, Whereabouts()), kind))


def _chance(
    kind: PlaceKind, ranks: Sequence[int], bad: Sequence[int], where: Mapping[int, Whereabouts]
) -> float:
    """Return how likely it is that as many ranks, or hosts where whole hosts are affected, make up
    one such place, whichever of them are affected.
    """
    affected = set(bad)
    places: dict[str, set[object]] = defaultdict(set)
    hosts: dict[str, set[bool]] = defaultdict(set)
    for rank in ranks:
        hosts[_named(where, rank, "host")].add(rank in affected)
    whole = kind in _OF_HOSTS and all(len(each) == 1 for each in hosts.values())
    for rank in ranks:
        places[_named(where, rank, kind)].add(_named(where, rank, "host") if whole else rank)
    units = len(hosts) if whole else len(ranks)
    size = len(places[_named(where, bad[0], kind)])
    as_large = sum(len(each) == size for each in places.values())
    return as_large / math.comb(units, size)
