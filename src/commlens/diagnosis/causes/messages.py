"""Messages that cannot meet, in three ways.

A receive from any source took the message that a later receive names: ``recv(src=None)`` gets rank
1's message where rank 2's was meant, and ``recv(src=1)`` waits for ever. The peer does not exist:
``send(dst=8)`` in a group of 8 ranks. Or activation checkpointing runs a forward pass again, and
with it a receive whose message was sent once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from commlens.diagnosis.align.messages import Taken, find_taken
from commlens.diagnosis.causes.context import Case, Context, collective_of, group_of, source_of
from commlens.diagnosis.graph.wait_graph import WaitNode
from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.diagnosis.index.process_exit import CRASHES
from commlens.model.cause import NoSuchPeer, Recomputed, TakenMessage
from commlens.model.collective import Collective, FrameKind, State
from commlens.model.grouping import grouped


@dataclass(kw_only=True)
class TakenCase(Case[TakenMessage]):
    """A message that a receive from any source took from a later one."""

    taken: Taken


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
        _add_taken(context, node, taken)
        explained |= {node.rank, receive.peer}
        graph = context.graph
        graph.deadlocks = [
            ring
            for ring in graph.deadlocks
            if not (node in ring or not context.graph.reaching([node]).isdisjoint(ring))
        ]
    return explained


def _is_for_ever(context: Context, node: WaitNode, sender: int) -> bool:
    """Return whether nothing can end the wait: it leads in a circle, or to a sender that ended
    well.
    """
    edges = context.graph.edges
    seen, todo = {node}, [node]
    while todo:
        here = todo.pop()
        if not edges[here] and here != WaitNode("absent", sender):
            return False
        for target in edges[here]:
            if target not in seen:
                seen.add(target)
                todo.append(target)
    ended = context.job.views[sender].exit.kind == "clean"
    return ended or WaitNode("absent", sender) not in seen


def _add_taken(context: Context, node: WaitNode, taken: Taken) -> None:
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
    weight = len(blocked) + 1
    case = TakenCase(cause, receive, receive.source, blocked=blocked, weight=weight, taken=taken)
    context.cases.append(case)


def find_no_such_peer(context: Context) -> set[int]:
    """Find the ranks whose newest message names a rank that its group does not have.

    Returns:
        The ranks that do not exist.
    """
    wrong = grouped(
        ((op.op, op.peer), (rank, op))
        for rank, view in sorted(context.job.views.items())
        if (op := _to_nowhere(view)) is not None
    )
    for calls in wrong.values():
        ranks = [rank for rank, _ in calls]
        victims = _demote_crashes(context, ranks)
        _add_calls(context, ranks, calls[0][1], victims)
    return {peer for _, peer in wrong if peer is not None}


def _demote_crashes(context: Context, ranks: list[int]) -> set[int]:
    """Demote the deaths of ranks in such a message: gloo crashes in a receive (torch 2.13).

    Returns:
        The victims of these deaths.
    """
    victims: set[int] = set()
    for cause in (case.cause for case in context.cases if case.cause.kind == "dead"):
        exits = [context.job.views[rank].exit for rank in cause.culprits]
        crashed = exits and all(each.signal in CRASHES for each in exits)
        if crashed and {*cause.culprits} <= {*ranks}:
            cause.root_cause = False
            victims |= {*cause.victims}
    return victims


def _to_nowhere(view: RankView) -> Collective | None:
    """Return the first message of a rank that has not completed and names no rank of its group."""
    if view.dump is not None:
        return None  # other recorders do not tell a group's ranks reliably
    for op in view.log.collectives:
        ended = op.state is State.COMPLETED or op.state is State.UNKNOWN
        outside = op.peer is not None and op.peer not in op.channel.group.ranks
        if op.is_point_to_point and not ended and outside:
            return op
    return None


def _add_calls(context: Context, culprits: list[int], op: Collective, victims: set[int]) -> None:
    nodes = [node for node in context.graph.blocks if node.rank in culprits]
    blocked = sorted({*context.blocked_by(nodes)} - {*culprits})
    cause = NoSuchPeer(
        kind="mismatch/p2p",
        why="user-code",
        root_cause=True,
        culprits=list(culprits),
        blamed_by="arguments",
        victims=sorted({*blocked, *victims} - {*culprits}),
        confidence="high",
        ranks=culprits,
        collective=collective_of(op),
        group=group_of(op),
        source=source_of(op),
    )
    weight = len({*blocked, *culprits})
    context.cases.append(Case(cause, op, op.source, blocked=blocked, weight=weight, order=(0,)))


_FILES = re.compile(r"checkpoint[^/]*\.py$|/tensor_parallel/random\.py$")
_FUNCTIONS = frozenset({"recompute_fn", "unpack_hook", "backward"})
"""Of torch, DeepSpeed, fairscale and Megatron: these run a checkpointed function again."""


def find_recomputed(job: JobIndex, rank: int, op: Collective) -> Recomputed | None:
    """Return a rank's message as one that was issued again; None if its call is no repetition, or
    if the other side issued as many.
    """
    if not op.is_point_to_point or op.peer is None or op.tag or not is_repeated(op):
        return None
    issued = fewer_issued(job, rank, op)
    return (
        Recomputed(rank, collective_of(op), issued, source_of(op)) if issued is not None else None
    )


def is_repeated(op: Collective) -> bool:
    """Return whether a checkpointed function issued an op as it ran again, in backward."""
    return any(
        frame.kind is not FrameKind.USER
        and frame.function in _FUNCTIONS
        and _FILES.search(frame.file) is not None
        for frame in op.stack
    )


def fewer_issued(job: JobIndex, rank: int, op: Collective) -> int | None:
    """Return how many messages a rank's peer issued to match its own up to ``op``; None if enough,
    or if records are incomplete.
    """
    if job.foreign or op.peer not in job.views:
        return None
    own, other = job.views[rank], job.views[op.peer]
    # a receive from any rank may have met it
    unsorted = (op.channel.key, -1, "recv") in other.pairs
    if own.wrapped or other.wrapped or unsorted:
        return None
    back = "recv" if op.op == "send" else "send"
    issued = len(other.pairs.get((op.channel.key, rank, back), []))
    return issued if issued < op.sequence_number else None
