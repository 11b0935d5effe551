"""Ranks that wait for each other, and the ranks among them that left the usual order."""

from __future__ import annotations

from typing import Literal, NamedTuple

from commlens.diagnosis.align.out_of_step import keeps_routine
from commlens.diagnosis.align.peer_order import find_reordered
from commlens.diagnosis.align.routine import expected_next, leaves_routine_at
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.graph.wait_graph import Edge, Node, shortest_cycle
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.next_steps import cycle_step, receives_step, unmet_step
from commlens.diagnosis.words.phrases import prose
from commlens.diagnosis.words.sides import (
    UNDECIDED,
    describe_sides,
    group_sides,
    kind_phrase,
    kinds_phrase,
    separation,
    tie_step,
)
from commlens.model.collective import Collective
from commlens.model.verdict import Finding
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    group_phrase,
    joined,
    op_phrase,
    ranks_phrase,
    verb,
)

_DEPARTURES_MAX = 1024  # ranks whose routines are looked at for one finding
How = Literal["history", "order", "tie"]
Departures = dict[int, tuple[Collective, Collective | None]]
"""By rank: the op with which it leaves the usual order, and the op that it, or else the others,
used to issue in its place.
"""
Path = list[tuple[Node, Node, Edge]]


def find_cycles(context: Context) -> None:
    """Make one finding for each cycle; its explanation lists the cycle edge by edge."""
    for component in context.graph.deadlocks:
        path = shortest_cycle(context.graph, component)
        if path:
            _cycle(context, path, [node for node in component if node.kind == "wait"])


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
        view = context.job.views.get(node.rank)
        undated = (
            view is not None
            and view.columns is not None
            and not (view.log.captured_ns or view.died or view.lost_newest)
        )
        departures = (
            _departed_before(context, node)
            if undated and node.kind in ("absent", "no-record", "elsewhere")
            else {}
        )
        if departures:
            found.setdefault(tuple(sorted(departures)), (departures, []))[1].append(node)
        else:
            others.append(node)
    for departures, nodes in found.values():
        _departed(context, departures, nodes)
    return others


def _departed_before(context: Context, absent: Node) -> Departures:
    """Return the ranks that left their routine for the collective in which they wait, and in which
    others wait for the absent rank.
    """
    waits = sorted(node for node in context.graph.reaching([absent]) if node.kind == "wait")[
        :_DEPARTURES_MAX
    ]
    heads = {node.rank: context.graph.blocks[node].op for node in waits}
    coming = (
        expected_next(context.job.views[absent.rank])
        if not context.job.views[absent.rank].outdated
        else None
    )
    awaited = {op.channel.key for op in heads.values()} | (
        {coming.channel.key} if coming is not None else set()
    )
    left: Departures = {}
    for rank, op in heads.items():
        departure = leaves_routine_at(context.job.views[rank])
        if (
            departure is None
            or departure[0].index != op.index
            or departure[1] is None
            or op.is_point_to_point
        ):
            continue
        usual = departure[1].channel.key
        if usual != op.channel.key and not departure[1].is_point_to_point and usual in awaited:
            left[rank] = departure
    return left if len(left) * 2 <= len(heads) + 1 and absent.rank not in left else {}


def _departed(context: Context, departures: Departures, absent: list[Node]) -> None:
    culprits = sorted(departures)
    op, usual = departures[culprits[0]]
    assert usual is not None
    blocked = sorted({*context.blocked_by(absent)} - set(culprits))
    ranks = [node.rank for node in absent]
    edges = [edge for node in absent for edge in context.graph.edges_into(node)]
    finding = Finding(
        kind="cycle",
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        victims=blocked,
        confidence="medium",
        summary=_moved_on(culprits, departures, "history"),
        explanation=prose(
            phrases.waiting(context, edges),
            phrases.waiting_behind(context, sorted({edge.rank for edge in edges}), blocked),
        ),
        next_step=cycle_step(culprits, op, usual),
        evidence=[
            _how_decided("history", culprits),
            (
                f"Whether {ranks_phrase(ranks)} came is not known: the"
                f" {verb(ranks, 'dump', 'dumps')} may be older than the others."
            ),
        ],
        would_raise_confidence=(
            "Dumps of all ranks from one moment, while the job hangs, would show whether the ranks"
            " wait for each other."
        ),
    )
    context.add(finding, op, op.source, blocked=len({*blocked, *culprits}))


def _cycle(context: Context, path: Path, waits: list[Node]) -> None:
    ranks = sorted({node.rank for node in waits})
    departures, how = _departures(context, waits, ranks)
    culprits = sorted(departures)
    steps = [
        f"rank {a.rank} waits in {op_phrase(edge.op)}"
        + (f" ({edge.op.source.where})" if edge.op.source is not None else "")
        + ("" if edge.op.peer == b.rank else f" for rank {b.rank}")
        for a, b, edge in path
    ]
    blocked = context.blocked_by(waits)
    waited = context.longest_wait(ranks)
    prose_of_path = prose(
        f"{capital('; '.join(steps))}.",
        f"The longest wait is {duration(waited)}." if waited else "",
        phrases.waiting_behind(context, ranks, blocked),
    )
    finding = Finding(
        kind="cycle",
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        victims=sorted({*blocked, *ranks} - set(culprits)),
        confidence="high" if how == "history" else "medium",
        summary="",
        explanation=prose_of_path,
        evidence=[f"{step}." for step in steps],
    )
    if how != "history":
        finding.would_raise_confidence = (
            "A run with some successful steps before the fault would show which rank departs from"
            " its routine."
        )
    if culprits:
        op, usual = departures[culprits[0]]
        finding.summary = _summary(ranks, departures, how)
        finding.next_step = cycle_step(culprits, op, usual)
        finding.evidence.insert(0, _how_decided(how, culprits))
        context.add(finding, op, op.source, blocked=len({*blocked, *ranks}))
        return
    ops = {node.rank: context.graph.blocks[node].op for node in waits}
    sides = group_sides(ops)
    across = " across groups" if len({edge.instance.key for _, _, edge in path}) > 1 else ""
    finding.confidence, finding.summary = (
        "low",
        f"{ranks_phrase(ranks)} wait for each other{across}",
    )
    finding.explanation = prose(
        describe_sides(sides, ops), separation(context, sides), finding.explanation
    )
    firsts = [ops[side[0]] for side in sides]
    finding.next_step = (
        receives_step(ranks, firsts)
        if {op.op for op in ops.values()} in ({"recv"}, {"send"})
        else tie_step(firsts)
    )
    finding.evidence.insert(0, UNDECIDED)
    unmet = _unmet_message(context, path)
    if unmet is not None:
        finding.summary, finding.next_step = (
            _unmet_summary(unmet),
            unmet_step(unmet.op, unmet.rank, unmet.stands_in),
        )
        finding.evidence.insert(0, f"{_counts(unmet)}.")
    context.add(finding, path[0][2].op, None, blocked=len({*blocked, *ranks}))


class Unmet(NamedTuple):
    """A message of a cycle whose other side is not issued: its rank waits in a collective first,
    for the rank of the message.
    """

    rank: int  # that waits for the message
    op: Collective
    issued: int  # messages of the other side to match, of which none is left
    stands_in: Collective  # where the other side waits


def _unmet_message(context: Context, path: Path) -> Unmet | None:
    """Return the first message of a cycle that the other side has not issued; None without complete
    records.
    """
    for node, target, edge in path:
        op, other = edge.op, context.job.views[target.rank]
        if (
            not op.is_point_to_point
            or op.peer != target.rank
            or op.tag
            or not context.job.knows.completed_ops
            or other.wrapped
        ):
            continue
        back = "recv" if op.op == "send" else "send"
        issued = len(other.pairs.get((op.channel.key, node.rank, back), []))
        stands_in = context.graph.blocks[target].op
        # a receive from any rank may have met it
        unsorted = (op.channel.key, -1, "recv") in other.pairs
        if (
            issued < op.sequence_number
            and not unsorted
            and not context.job.views[node.rank].wrapped
            and not stands_in.is_point_to_point
        ):
            return Unmet(node.rank, op, issued, stands_in)
    return None


def _unmet_summary(unmet: Unmet) -> str:
    op, peer = unmet.op, unmet.op.peer
    lacks = "receives" if op.op == "send" else "sends"
    return (
        f"rank {unmet.rank} waits in {op_phrase(op)}, which rank {peer} {lacks} only after"
        f" {op_phrase(unmet.stands_in)}, if at all; rank {peer} waits there for rank {unmet.rank}"
    )


def _counts(unmet: Unmet) -> str:
    op, peer = unmet.op, unmet.op.peer
    did, other = ("send", "receive") if op.op == "send" else ("receive", "send")
    before = (
        f"before {unmet.stands_in.op} at {frame_phrase(unmet.stands_in.source)}"
        if unmet.stands_in.source
        else "before it waited"
    )
    one = (
        f"Rank {unmet.rank} issued {count(op.sequence_number, did)}"
        f" {'to' if did == 'send' else 'from'} rank {peer} up to then"
    )
    return (
        f"{one}, rank {peer} {count(unmet.issued, other)} {'to' if other == 'send' else 'from'}"
        f" rank {unmet.rank} {before}"
    )


def _summary(ranks: list[int], departures: Departures, how: How) -> str:
    culprits = sorted(departures)
    usual = departures[culprits[0]][1]
    they_wait = f"{ranks_phrase(ranks)} wait for each other"
    if (
        how == "history"
        and len(culprits) == 1
        and usual is not None
        and usual.op == "send"
        and usual.peer in ranks
    ):
        return (
            f"rank {culprits[0]} did not send to rank {usual.peer} this time, as it always had"
            f" before; {they_wait}"
        )
    return f"{_moved_on(culprits, departures, how)}; {they_wait}"


def _moved_on(culprits: list[int], departures: Departures, how: How) -> str:
    """``"rank 1 moved on to all_reduce #7 of group dp [0-3], not to all_gather of group tp [0-1] as
    before"``.
    """
    own, usual = (
        [departures[rank][0] for rank in culprits],
        [departures[rank][1] for rank in culprits],
    )
    kinds = {kind_phrase(op) for op in own}
    same = len({(op.channel.key, op.op, op.peer, op.sequence_number) for op in own}) == 1
    name = (
        op_phrase(own[0])
        if same
        else kinds_phrase(own)
        if len({op.op for op in own}) == 1
        else joined(sorted(kinds)[:3])
    )
    instead = ""
    before = [op for op in usual if op is not None]
    if before and len(before) == len(usual) and len({op.op for op in before}) == 1:
        alike = len({(op.channel.key, op.peer) for op in before}) == 1
        instead = (
            f", not to {_without_number(before[0]) if alike else kinds_phrase(before)} as before"
        )
        if how != "history":
            instead = f" where the others issued {kinds_phrase(before)}"
    return f"{ranks_phrase(culprits)} moved on to {name}{instead}"


def _how_decided(how: How, culprits: list[int]) -> str:
    subject = ranks_phrase(culprits)
    if how == "history":
        return (
            f"{capital(subject)} {verb(culprits, 'departs from its', 'depart from their')} usual"
            " routine here; the others keep to theirs."
        )
    return f"The order of {subject} differs from that of most others."


def _without_number(op: Collective) -> str:
    """``"all_reduce of group dp [0-3]"``, ``"recv from rank 1"``."""
    return (
        kind_phrase(op) if op.is_point_to_point else f"{op.op} of {group_phrase(op.channel.group)}"
    )


def _departures(context: Context, waits: list[Node], ranks: list[int]) -> tuple[Departures, How]:
    """Return the ranks that leave the order of most of their peers; else those that leave their own
    routine; else none.
    """
    job, blocks = context.job, context.graph.blocks
    own: Departures = {
        rank: found for rank in ranks if (found := leaves_routine_at(job.views[rank])) is not None
    }
    keys = {
        op.channel.key
        for op in (blocks[node].op for node in waits)
        if not op.is_point_to_point and not op.is_store_wait
    }
    lines = {
        (op.op, op.source)
        for node in waits
        if (op := blocks[node].op).is_point_to_point and op.source is not None
    }
    others = [
        block.op
        for block in blocks.values()
        if not (block.op.is_point_to_point or block.op.is_store_wait)
    ]
    around = keys or {op.channel.key for op in others}
    reordered = {
        rank: place for rank, place in find_reordered(job, around, lines).items() if rank in ranks
    }
    kept = {rank: keeps_routine(job, rank, op) for rank, (op, _) in reordered.items()}
    odd: Departures = {rank: place for rank, place in reordered.items() if kept[rank] is not True}
    if odd:
        if all(rank in own and own[rank][0].index == op.index for rank, (op, _) in odd.items()):
            return {rank: own[rank] for rank in odd}, "history"
        return odd, "order"
    if own and len(own) * 2 <= len(ranks):
        return own, "history"
    return {}, "tie"
