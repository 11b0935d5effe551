"""Ranks that wait for each other, and the ranks among them that left the usual order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from commlens.diagnosis.align.out_of_step import keeps_routine
from commlens.diagnosis.align.peer_order import find_reordered
from commlens.diagnosis.align.routine import expected_next, leaves_routine_at
from commlens.diagnosis.align.tie_break import by_order, by_own_routine, first_decision, sides_of
from commlens.diagnosis.causes.context import (
    Context,
    collective_of,
    group_of,
    source_of,
    waits_of,
)
from commlens.diagnosis.graph.wait_graph import Edge, Node, shortest_cycle
from commlens.model.cause import BlamedBy, Confidence, Cycle, LeftOrder, RingWait, UnmetMessage
from commlens.model.collective import ChannelKey, Collective, Frame

_DEPARTURES_MAX = 1024  # ranks whose routines are looked at for one cause
_CONFIDENCE: dict[BlamedBy, Confidence] = {
    "routine": "high",
    "majority": "medium",
    "undecided": "low",
}
Departures = dict[int, tuple[Collective, Collective | None]]
"""By rank: the op with which it leaves the usual order, and the op that it, or else the others,
used to issue in its place.
"""
Path = list[tuple[Node, Node, Edge]]


class Unmet(NamedTuple):
    """A message of a cycle whose other side is not issued: its rank waits in a collective first,
    for the rank of the message.
    """

    rank: int  # that waits for the message
    op: Collective
    issued: int  # messages of the other side to match, of which none is left
    stands_in: Collective  # where the other side waits


@dataclass
class FoundCycle:
    """Ranks that wait for each other, and the evidence."""

    cause: Cycle
    path: Path  # a shortest cycle of their waits
    ops: dict[int, Collective]  # in which they wait, by rank
    sides: list[list[int]]  # that wait in alike ones, the most ranks first
    blocked: list[int]  # ranks that wait for them, directly or behind others
    departures: Departures
    unmet: Unmet | None  # only if nobody left the order


@dataclass
class FoundDeparture:
    """Ranks that left their routine for another collective, and the evidence."""

    cause: Cycle
    edges: list[Edge]  # the waits for ranks that are not known to have come
    blocked: list[int]  # other ranks whose wait ends at them
    departures: Departures


def find_cycles(context: Context) -> None:
    """Find the cycles of the wait-for graph."""
    for component in context.graph.deadlocks:
        path = shortest_cycle(context.graph, component)
        if path:
            _add_cycle(context, path, [node for node in component if node.kind == "wait"])


def _add_cycle(context: Context, path: Path, waits: list[Node]) -> None:
    ranks = sorted({node.rank for node in waits})
    ops = {node.rank: context.graph.blocks[node].op for node in waits}
    departures, blamed_by = _departures(context, waits, ranks)
    culprits, blocked = sorted(departures), context.blocked_by(waits)
    unmet = _unmet_message(context, path) if not culprits else None
    cause = Cycle(
        kind="cycle",
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        blamed_by=blamed_by,
        victims=sorted({*blocked, *ranks} - set(culprits)),
        confidence=_CONFIDENCE[blamed_by],
        ranks=ranks,
        ring=[_ring_wait(node.rank, target.rank, edge.op) for node, target, edge in path],
        left_order=_left_order(departures),
        unmet_message=_unmet_as_data(unmet) if unmet is not None else None,
    )
    op = departures[culprits[0]][0] if culprits else path[0][2].op
    context.add(
        FoundCycle(cause, path, ops, sides_of(ops), blocked, departures, unmet),
        op,
        op.source if culprits else None,
        blocked=len({*blocked, *ranks}),
    )


def _ring_wait(rank: int, awaited: int, op: Collective) -> RingWait:
    return RingWait(rank, awaited, collective_of(op), group_of(op), source_of(op))


def _left_order(departures: Departures) -> list[LeftOrder]:
    return [
        LeftOrder(
            rank,
            collective_of(op),
            group_of(op),
            collective_of(usual) if usual is not None else None,
            group_of(usual) if usual is not None else None,
        )
        for rank, (op, usual) in sorted(departures.items())
    ]


def _unmet_as_data(unmet: Unmet) -> UnmetMessage:
    return UnmetMessage(
        unmet.rank, collective_of(unmet.op), unmet.issued, collective_of(unmet.stands_in)
    )


def _departures(
    context: Context, waits: list[Node], ranks: list[int]
) -> tuple[Departures, BlamedBy]:
    """Return the ranks that leave the order of most of their peers; else those that leave their own
    routine; else none.
    """
    job = context.job
    own: Departures = {
        rank: found for rank in ranks if (found := leaves_routine_at(job.views[rank])) is not None
    }
    ops = [context.graph.blocks[node].op for node in waits]
    reordered = find_reordered(job, _channels_around(context, ops), _message_lines(ops))
    odd: Departures = {
        rank: place
        for rank, place in reordered.items()
        if rank in ranks and keeps_routine(job, rank, place[0]) is not True
    }
    there = [rank for rank in odd if rank in own and own[rank][0].index == odd[rank][0].index]
    culprits, by = first_decision(
        lambda: by_order(odd, there), lambda: by_own_routine(own, of=len(ranks))
    )
    left = own if by == "routine" else odd
    return {rank: left[rank] for rank in culprits}, by


def _channels_around(context: Context, ops: Iterable[Collective]) -> set[ChannelKey]:
    """Return the channels of the collectives among these ops, else of all in which ranks wait."""
    return _channels(ops) or _channels(block.op for block in context.graph.blocks.values())


def _channels(ops: Iterable[Collective]) -> set[ChannelKey]:
    return {op.channel.key for op in ops if not (op.is_point_to_point or op.is_store_wait)}


def _message_lines(ops: Iterable[Collective]) -> set[tuple[str, Frame]]:
    return {(op.op, op.source) for op in ops if op.is_point_to_point and op.source is not None}


def _unmet_message(context: Context, path: Path) -> Unmet | None:
    """Return the first message of a cycle that the other side has not issued; None without complete
    records.
    """
    if not context.job.knows.completed_ops:
        return None
    for node, target, edge in path:
        if edge.op.is_point_to_point and edge.op.peer == target.rank and not edge.op.tag:
            stands_in = context.graph.blocks[target].op
            issued = _fewer_issued(context, node.rank, edge.op)
            if issued is not None and not stands_in.is_point_to_point:
                return Unmet(node.rank, edge.op, issued, stands_in)
    return None


def _fewer_issued(context: Context, rank: int, op: Collective) -> int | None:
    """Return how many messages a rank's peer issued to match its own up to ``op``; None if enough,
    or if records are incomplete.
    """
    assert op.peer is not None
    own, other = context.job.views[rank], context.job.views[op.peer]
    # a receive from any rank may have met it
    unsorted = (op.channel.key, -1, "recv") in other.pairs
    if own.wrapped or other.wrapped or unsorted:
        return None
    back = "recv" if op.op == "send" else "send"
    issued = len(other.pairs.get((op.channel.key, rank, back), []))
    return issued if issued < op.sequence_number else None


def find_departures(context: Context, sinks: list[Node]) -> list[Node]:
    """Find ranks of other tools' dumps that moved on to another collective than usual, while they
    are awaited in the usual one.

    They hold up the job, whatever the ranks do that they wait for. That such a rank has not come is
    no evidence against it: its dump may have been taken earlier, and if it keeps its routine, it
    would have waited in another collective, too.

    Returns:
        The nodes that this does not explain.
    """
    others: list[Node] = []
    found: dict[tuple[int, ...], tuple[Departures, list[Node]]] = {}
    for node in sinks:
        departures = _departed_before(context, node) if _is_undated(context, node) else {}
        if departures:
            found.setdefault(tuple(sorted(departures)), (departures, []))[1].append(node)
        else:
            others.append(node)
    for departures, nodes in found.values():
        _add_departure(context, departures, nodes)
    return others


def _is_undated(context: Context, node: Node) -> bool:
    """Return whether a node is an absent rank whose dump does not tell when it was taken."""
    view = context.job.views.get(node.rank)
    if (
        view is None
        or view.columns is None
        or node.kind not in ("absent", "no-record", "elsewhere")
    ):
        return False
    return not (view.log.captured_ns or view.died or view.lost_newest)


def _departed_before(context: Context, absent: Node) -> Departures:
    """Return the ranks that left their routine for the collective in which they wait, and in which
    others wait for the absent rank.
    """
    waits = sorted(node for node in context.graph.reaching([absent]) if node.kind == "wait")[
        :_DEPARTURES_MAX
    ]
    heads = {node.rank: context.graph.blocks[node].op for node in waits}
    view = context.job.views[absent.rank]
    coming = expected_next(view) if not view.outdated else None
    awaited = {op.channel.key for op in heads.values()}
    if coming is not None:
        awaited.add(coming.channel.key)
    left: Departures = {}
    for rank, op in heads.items():
        departure = leaves_routine_at(context.job.views[rank])
        if departure is not None and _is_awaited_elsewhere(op, *departure, awaited):
            left[rank] = departure
    # The absent rank is one of those that are compared.
    decision = by_own_routine(left, of=len(heads) + 1)
    return left if decision is not None and absent.rank not in left else {}


def _is_awaited_elsewhere(
    head: Collective, op: Collective, usual: Collective | None, awaited: set[ChannelKey]
) -> bool:
    """Return whether a rank waits in the collective ``op`` that is not its routine, and is awaited
    in the ``usual`` one, of another group.
    """
    if op.index != head.index or usual is None:
        return False
    if head.is_point_to_point or usual.is_point_to_point:
        return False
    return usual.channel.key != head.channel.key and usual.channel.key in awaited


def _add_departure(context: Context, departures: Departures, absent: list[Node]) -> None:
    culprits = sorted(departures)
    op = departures[culprits[0]][0]
    blocked = sorted({*context.blocked_by(absent)} - set(culprits))
    edges = [edge for node in absent for edge in context.graph.edges_into(node)]
    cause = Cycle(
        kind="cycle",
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        blamed_by="routine",
        victims=blocked,
        confidence="medium",
        ranks=sorted({*blocked, *culprits}),
        waits=waits_of(context, edges),
        left_order=_left_order(departures),
        perhaps_come=[node.rank for node in absent],
    )
    context.add(
        FoundDeparture(cause, edges, list(blocked), departures),
        op,
        op.source,
        blocked=len({*blocked, *culprits}),
    )
