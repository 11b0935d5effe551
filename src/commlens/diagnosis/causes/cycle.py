"""Ranks that wait for each other, and the ranks among them that left the usual order.

Say rank 0 waits in an all_reduce of group a for rank 1, and rank 1 in an all_reduce of group b for
rank 0. Both are stuck, so the wait alone blames neither. Rank 1 is to blame if most ranks of the
job use a before b, or if rank 1 itself always did; or else if it came to its line more often than
most ranks did. If nothing decides, nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from commlens.diagnosis.align.peer_order import find_reordered
from commlens.diagnosis.align.routine import (
    RANKS_MAX,
    count_rounds,
    expected_next,
    leaves_routine,
    leaves_routine_at,
    with_next_line,
)
from commlens.diagnosis.align.tie_break import (
    UNDECIDED,
    by_order,
    by_own_routine,
    by_rounds,
    first_decision,
)
from commlens.diagnosis.causes.context import (
    Case,
    Context,
    collective_of,
    group_of,
    source_of,
    waits_of,
)
from commlens.diagnosis.causes.groups_differ import calls_that_differ
from commlens.diagnosis.causes.messages import fewer_issued, find_recomputed
from commlens.diagnosis.graph.wait_graph import Edge, WaitNode, shortest_cycle
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import (
    AwaitedResult,
    BlamedBy,
    Confidence,
    Cycle,
    Decision,
    LeftOrder,
    RingWait,
    Rounds,
    UnmetMessage,
)
from commlens.model.collective import ChannelKey, Collective
from commlens.model.grouping import grouped
from commlens.model.ranklog import ThreadStack

_DEPARTURES_MAX = 1024  # ranks whose routines are looked at for one cause
_CONFIDENCE: dict[BlamedBy, Confidence] = {
    "recomputation": "high",
    "routine": "high",
    "rounds": "medium",
    "majority": "medium",
    "undecided": "low",
}
Departures = dict[int, tuple[Collective, Collective | None]]
"""By rank that left an order: the op with which it did, and the op that it used to issue in that
place, or that the others issue there.
"""
Path = list[tuple[WaitNode, WaitNode, Edge]]
"""A cycle: each waiting thread, the thread that it waits for, and the wait."""


class Unmet(NamedTuple):
    """A message of a cycle whose other side is not issued: its rank waits in a collective first,
    for the rank of the message.
    """

    rank: int  # that waits for the message
    peer: int  # the other side
    op: Collective
    issued: int  # messages of the other side to match, of which none is left
    stands_in: Collective  # where the other side waits


@dataclass(kw_only=True)
class CycleCase(Case[Cycle]):
    """Ranks that wait for each other, in their ops."""

    path: Path = field(default_factory=list)  # a shortest cycle of their waits
    departures: Departures
    # only if nobody is blamed, or the rank that waits for the message departed
    unmet: Unmet | None = None
    # threads that wait for a lock, with their ranks, if the order of threads may be the cause
    locks: list[tuple[int, ThreadStack]] = field(default_factory=list)


def find_cycles(context: Context) -> None:
    """Find the cycles of the wait-for graph, without those of calls whose groups differ."""
    explained = calls_that_differ(context)
    for component in context.graph.deadlocks:
        path = shortest_cycle(context.graph, component)
        if any(id(edge.op) not in explained for _, _, edge in path):
            _add_cycle(context, path, [node for node in component if node.kind == "wait"])


def _add_cycle(context: Context, path: Path, waits: list[WaitNode]) -> None:
    ranks = sorted({node.rank for node in waits})
    ops = {node.rank: context.graph.blocks[node].op for node in waits}
    found = (find_recomputed(context.job, node.rank, edge.op) for node, _, edge in path)
    recomputed = next(filter(None, found), None)
    rounds, locks = None, []
    if recomputed is not None:
        departures: Departures = {recomputed.rank: (ops[recomputed.rank], None)}
        decision = Decision((recomputed.rank,), "recomputation")
    elif _has_order_of_threads(context, ops.values()):
        departures, decision = {}, UNDECIDED
        locks = _threads_at_locks(context, ranks)
    else:
        departures, decision = _departures(context, waits, ranks)
        if not departures:
            decision, rounds = _by_rounds(context, ops)
    culprits = list(decision.culprits)
    unmet = _unmet_message(context, path)
    # Where ranks are blamed, a message matters only if its own rank departed: else it follows.
    if recomputed or (culprits and unmet is not None and unmet.rank not in departures):
        unmet = None
    blocked = context.blocked_by(waits)
    cause = Cycle(
        kind="cycle",
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        blamed_by=decision.by,
        victims=sorted({*blocked, *ranks} - set(culprits)),
        confidence=_CONFIDENCE[decision.by],
        ranks=ranks,
        ring=_ring(path),
        left_order=_left_order(departures, context.job),
        rounds=rounds,
        recomputed=recomputed,
        unmet_message=UnmetMessage(
            unmet.rank, collective_of(unmet.op), unmet.issued, collective_of(unmet.stands_in)
        )
        if unmet is not None
        else None,
        awaited_result=_awaited_result(path),
    )
    op = ops[culprits[0]] if culprits else path[0][2].op
    if departures:
        op = departures[culprits[0]][0]
    context.cases.append(
        CycleCase(
            cause,
            op,
            op.source if culprits else None,
            blocked=blocked,
            ops=ops,
            weight=len({*blocked, *ranks}),
            path=path,
            departures=departures,
            unmet=unmet,
            locks=locks,
        )
    )


# --- which rank left an order


def _has_order_of_threads(context: Context, ops: Iterable[Collective]) -> bool:
    """Return whether several threads of Python on a rank issue the collectives in which ranks wait.
    The order between threads is no routine. A thread of autograd has its caller's order: its stack
    does not begin in ``threading.py``, even if it runs hooks in Python.
    """
    keys = _channels(ops)
    for view in context.job.views.values():
        of_python = {
            stack.thread
            for stack in view.log.stacks
            if stack.frames and stack.frames[-1].function == "_bootstrap"
        }
        issuing = {view.tracks[key].thread for key in keys if key in view.tracks}
        if issuing & of_python and len(issuing) > 1:
            return True
    return False


def _departures(
    context: Context, waits: list[WaitNode], ranks: list[int]
) -> tuple[Departures, Decision]:
    """Return the ranks that leave the order of most of their peers; else those that leave their own
    routine; else none.
    """
    off_routine: Departures = {
        rank: found
        for rank in ranks
        if (found := leaves_routine_at(context.job.views[rank])) is not None
    }
    reordered = _reordered(context, [context.graph.blocks[node].op for node in waits], ranks)
    both = [
        rank
        for rank, (op, _) in reordered.items()
        if rank in off_routine and off_routine[rank][0].index == op.index
    ]
    decision = first_decision(
        lambda: by_order(reordered, both), lambda: by_own_routine(off_routine, of=len(ranks))
    )
    left = off_routine if decision.by == "routine" else reordered
    return {rank: left[rank] for rank in decision.culprits}, decision


def _reordered(context: Context, ops: list[Collective], ranks: list[int]) -> Departures:
    """Return the ranks that leave the order of most of their peers, unless their own routine led
    one to expect it.

    The order is that of the groups in which these ops wait; if they all are messages, of the groups
    in which any rank waits.
    """
    lines = {(op.op, op.source) for op in ops if op.is_point_to_point and op.source is not None}
    blocks = context.graph.blocks.values()
    channels = _channels(ops) or _channels(block.op for block in blocks)
    return {
        rank: place
        for rank, place in find_reordered(context.job, channels, lines).items()
        if rank in ranks and leaves_routine(context.job.views[rank], place[0]) is not False
    }


def _channels(ops: Iterable[Collective]) -> set[ChannelKey]:
    """Return the channels of the collectives among these ops."""
    return {op.channel.key for op in ops if not (op.is_point_to_point or op.is_store_wait)}


def _by_rounds(context: Context, ops: dict[int, Collective]) -> tuple[Decision, Rounds | None]:
    """Blame the ranks that came to every line of the waits more or less often than most of the job.
    No majority of the job comes equally often to a line with messages, or of a group of some ranks.

    Returns:
        The decision, and how far the ranks got at the line that tells most: to which also those
        that got least far came often.
    """
    if any(op.is_point_to_point for op in ops.values()) or len(context.job.views) > RANKS_MAX:
        return UNDECIDED, None
    lines = {(op.op, op.source): op for _, op in sorted(ops.items())}
    counted = [count_rounds(context.job, op, of_all=True) for op in lines.values()]
    rounds = [each for each in counted if each is not None]
    if len(rounds) < len(counted) or len({each.odd for each in rounds}) != 1:
        return UNDECIDED, None
    line = max(rounds, key=lambda each: min(at.number for at in each.last))
    decision = by_rounds(ops.keys(), [line.odd]) or UNDECIDED  # ``odd`` is the same at each line
    return decision, with_next_line(context.job, line, ops)


# --- what else is known of the cycle


def _ring(path: Path) -> list[RingWait]:
    return [
        RingWait(
            node.rank,
            target.rank,
            collective_of(edge.op),
            group_of(edge.op),
            source_of(edge.op),
        )
        for node, target, edge in path
    ]


def _left_order(departures: Departures, job: JobIndex | None = None) -> list[LeftOrder]:
    """Return the departures as data. Without a job, for dumps of several moments, other ranks may
    have come since their dumps, so nothing is said of them.
    """
    return [
        LeftOrder(
            rank,
            collective_of(op),
            group_of(op),
            collective_of(usual) if usual is not None else None,
            group_of(usual) if usual is not None else None,
            new_line=job is not None and job.views[rank].is_new_line(op),
            one_more=job is not None and _is_one_more(job, departures, rank),
        )
        for rank, (op, usual) in sorted(departures.items())
    ]


def _is_one_more(job: JobIndex, departures: Departures, rank: int) -> bool:
    """Return whether only ranks that departed issued a rank's collective, and it is of the kind
    that the rank used to issue here.
    """
    op, usual = departures[rank]
    if op.is_point_to_point or op.is_setup or op.is_store_wait:
        return False
    tracks = job.tracks_on(op.channel.key)
    others = set(op.channel.group.all_ranks) - departures.keys()
    come_to = {tracks[one].last if one in tracks else 0 for one in others & job.views.keys()}
    if not others <= job.views.keys() or come_to != {op.sequence_number - 1}:
        return False
    return usual is not None and (usual.op, usual.channel.key) == (op.op, op.channel.key)


def _threads_at_locks(context: Context, ranks: list[int]) -> list[tuple[int, ThreadStack]]:
    """Return the threads of these ranks that wait for a lock, with their ranks."""
    views = context.job.views
    found = ((rank, each) for rank in ranks for each in views[rank].log.stacks)
    return [(rank, each) for rank, each in found if each.in_lock and each.source is not None]


def _unmet_message(context: Context, path: Path) -> Unmet | None:
    """Return the first message of a cycle that the other side has not issued; None without complete
    records.
    """
    for node, target, edge in path:
        if edge.op.is_point_to_point and edge.op.peer == target.rank and not edge.op.tag:
            stands_in = context.graph.blocks[target].op
            issued = fewer_issued(context.job, node.rank, edge.op)
            if issued is not None and not stands_in.is_point_to_point:
                return Unmet(node.rank, target.rank, edge.op, issued, stands_in)
    return None


def _awaited_result(path: Path) -> AwaitedResult | None:
    """Return the key that a rank waits for while the rank that writes such keys waits for its next
    broadcast or scatter, as a worker does in the loop in which it takes commands.
    """
    waits = {node: edge.op for node, _, edge in path}
    for node, target, edge in path:
        command = waits[target]
        if edge.op.is_for_key and command.args.root == node.rank:
            key = edge.op.channel.group.name
            return AwaitedResult(node.rank, key, target.rank, collective_of(command))
    return None


# --- ranks of other tools' dumps that moved on


def find_departures(context: Context, sinks: list[WaitNode]) -> list[WaitNode]:
    """Find ranks of other tools' dumps that moved on to another collective than usual, while they
    are awaited in the usual one.

    Whatever the absent ranks do that they wait for, they hold up the job. That an absent rank has
    not come is no evidence against it: its dump may have been taken earlier, and if it keeps its
    routine, it would have waited in another collective, too.

    Returns:
        The nodes that this does not explain.
    """
    departed = {
        node: _departed_before(context, node) if _is_undated(context, node) else {}
        for node in sinks
    }
    by_ranks = grouped((tuple(sorted(left)), node) for node, left in departed.items() if left)
    for nodes in by_ranks.values():
        _add_departure(context, departed[nodes[0]], nodes)
    return [node for node in sinks if not departed[node]]


def _is_undated(context: Context, node: WaitNode) -> bool:
    """Return whether a node is an absent rank whose dump does not tell when it was taken."""
    view = context.job.views.get(node.rank)
    if view is None or view.dump is None or node.kind not in ("absent", "no-record", "elsewhere"):
        return False
    return not (view.log.captured_ns or view.died or view.lost_newest)


def _departed_before(context: Context, absent: WaitNode) -> Departures:
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
    left: Departures = {
        rank: departure
        for rank, op in heads.items()
        if (departure := leaves_routine_at(context.job.views[rank])) is not None
        and _is_awaited_elsewhere(op, *departure, awaited)
    }
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


def _add_departure(context: Context, departures: Departures, absent: list[WaitNode]) -> None:
    """Add the cause for ranks that moved on to collectives in which they wait for absent ranks."""
    culprits = sorted(departures)
    op = departures[culprits[0]][0]
    blocked = sorted({*context.blocked_by(absent)} - set(culprits))
    edges = context.graph.edges_into_all(absent)
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
    weight = len({*blocked, *culprits})
    context.cases.append(
        CycleCase(cause, op, op.source, edges, list(blocked), weight=weight, departures=departures)
    )
