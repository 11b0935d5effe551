"""Messages to or from a rank that does not exist: torch lets them wait for ever."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.causes.context import Context, collective_of, group_of, source_of
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.index.process_exit import CRASHES
from commlens.model.cause import NoSuchPeer
from commlens.model.collective import Collective, State


@dataclass
class FoundNoSuchPeer:
    """Messages to or from a rank that does not exist, and the evidence."""

    cause: NoSuchPeer
    op: Collective
    blocked: list[int]  # behind these ranks


def find_no_such_peer(context: Context) -> set[int]:
    """Find the ranks whose newest message names a rank that its group does not have.

    Returns:
        The ranks that do not exist.
    """
    wrong: dict[tuple[str, int | None], list[tuple[int, Collective]]] = {}
    for rank, view in sorted(context.job.views.items()):
        op = _to_nowhere(view)
        if op is not None:
            wrong.setdefault((op.op, op.peer), []).append((rank, op))
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
    for claim in (case.claim for case in context.cases if case.claim.kind == "dead"):
        exits = [context.job.views[rank].exit for rank in claim.culprits]
        crashed = exits and all(each.signal in CRASHES for each in exits)
        if crashed and {*claim.culprits} <= {*ranks}:
            claim.root_cause = False
            victims |= {*claim.victims}
    return victims


def _to_nowhere(view: RankView) -> Collective | None:
    """Return the first message of a rank that has not completed and names no rank of its group."""
    if view.columns is not None:
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
    found = FoundNoSuchPeer(cause, op, blocked)
    context.add(found, op, op.source, blocked=len({*blocked, *culprits}), order=(0,))
