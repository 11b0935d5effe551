"""Receives that name a sender, after a receive from any source took that sender's message."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.align.any_source import Taken, find_taken
from commlens.diagnosis.causes.context import Context, collective_of, group_of, source_of
from commlens.diagnosis.graph.wait_graph import Node
from commlens.model.cause import TakenMessage


@dataclass
class FoundTakenMessage:
    """A message that a receive from any source took from a later one, and the evidence."""

    cause: TakenMessage
    taken: Taken
    blocked: list[int]  # behind the receiver


def find_taken_messages(context: Context) -> set[int]:
    """Find the receives that wait for ever because a receive from any source took their message.

    Returns:
        The ranks that need no other cause: those that receive, and senders that have ended.
    """
    explained: set[int] = set()
    for node, block in sorted(context.graph.blocks.items()):
        view, receive = context.job.views[node.rank], block.op
        if not block.stuck or receive.op != "recv" or receive.peer is None:
            continue
        taken = find_taken(context.job, view, receive)
        if taken is None or not _is_for_ever(context, node, receive.peer):
            continue
        _add(context, node, taken)
        explained |= {node.rank, receive.peer}
        graph = context.graph
        graph.deadlocks = [ring for ring in graph.deadlocks if not _leads_to(context, ring, node)]
    return explained


def _is_for_ever(context: Context, node: Node, sender: int) -> bool:
    """Return whether nothing can end the wait: it leads in a circle, or to a sender that ended
    well.
    """
    edges = context.graph.edges
    seen, todo = {node}, [node]
    while todo:
        here = todo.pop()
        if not edges[here] and here != Node("absent", sender):
            return False
        for target in edges[here]:
            if target not in seen:
                seen.add(target)
                todo.append(target)
    ended = context.job.views[sender].exit.kind == "clean"
    return ended or Node("absent", sender) not in seen


def _leads_to(context: Context, ring: list[Node], node: Node) -> bool:
    return node in ring or not context.graph.reaching([node]).isdisjoint(ring)


def _add(context: Context, node: Node, taken: Taken) -> None:
    receive = taken.receive
    blocked = [rank for rank in context.blocked_by([node]) if rank != node.rank]
    cause = TakenMessage(
        kind="mismatch/p2p",
        why="user-code",
        root_cause=True,
        culprits=[node.rank],
        blamed_by="arguments",
        victims=list(blocked),
        confidence="medium",
        rank=node.rank,
        receive=collective_of(receive),
        group=group_of(receive),
        source=source_of(receive),
        taken_at=source_of(taken.taker),
        sent_at=source_of(taken.sent),
        other_sender=taken.rival_rank,
        other_sent_at=source_of(taken.rival),
        races=taken.races,
    )
    found = FoundTakenMessage(cause, taken, blocked)
    context.add(found, receive, receive.source, blocked=len(blocked) + 1)
