"""Messages to or from a rank that does not exist: torch lets them wait for ever."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.phrases import prose
from commlens.model.collective import Collective, State
from commlens.model.verdict import Finding
from commlens.text import capital, frame_phrase, group_phrase, ranks_phrase


def find_no_such_peer(context: Context) -> set[int]:
    """Report ranks whose newest message names a rank that its group does not have.

    Returns:
        The ranks that do not exist.
    """
    wrong: dict[tuple[str, int | None], list[tuple[int, Collective]]] = {}
    for rank, view in sorted(context.job.views.items()):
        if view.columns is not None:
            continue  # other recorders do not tell a group's ranks reliably
        for op in view.log.collectives:
            ended = op.state is State.COMPLETED or op.state is State.UNKNOWN
            ranks = op.channel.group.ranks
            if op.is_point_to_point and not ended and op.peer is not None and op.peer not in ranks:
                wrong.setdefault((op.op, op.peer), []).append((rank, op))
                break
    for (name, peer), calls in wrong.items():
        culprits = [rank for rank, _ in calls]
        op = calls[0][1]
        nodes = [node for node in context.graph.blocks if node.rank in culprits]
        blocked = sorted({*context.blocked_by(nodes)} - {*culprits})
        where = frame_phrase(op.source) or "an unknown line"
        does = "sends to" if name == "send" else "receives from"
        group = group_phrase(op.channel.group)
        finding = Finding(
            kind="mismatch/p2p",
            why="user-code",
            root_cause=True,
            culprits=culprits,
            victims=blocked,
            confidence="high",
            summary=(
                f"{ranks_phrase(culprits)} {does if len(calls) == 1 else f'each {does}'} rank"
                f" {peer} at {where}, which is not in {group}"
            ),
            explanation=prose(
                f"{capital(name)} #{op.sequence_number} cannot complete.",
                phrases.waiting_behind(context, culprits, blocked),
            ),
            next_step=f"correct the peer that {ranks_phrase(culprits)} computes at {where}",
        )
        context.add(finding, op, op.source, blocked=len({*blocked, *culprits}), order=(0,))
    return {peer for _, peer in wrong if peer is not None}
