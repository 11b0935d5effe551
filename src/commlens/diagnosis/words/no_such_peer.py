"""Words about messages to or from a rank that does not exist."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.no_such_peer import FoundNoSuchPeer
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.text import capital, frame_phrase, group_phrase, ranks_phrase


def words(context: Context, found: FoundNoSuchPeer) -> Words:
    """Return what a finding says about messages to or from a rank that does not exist."""
    op, ranks = found.op, found.cause.ranks
    where = frame_phrase(op.source) or "an unknown line"
    does = "sends to" if op.op == "send" else "receives from"
    group = group_phrase(op.channel.group)
    return Words(
        summary=(
            f"{ranks_phrase(ranks)} {does if len(ranks) == 1 else f'each {does}'} rank {op.peer} at"
            f" {where}, which is not in {group}"
        ),
        explanation=prose(
            f"{capital(op.op)} #{op.sequence_number} cannot complete.",
            phrases.waiting_behind(context, ranks, found.blocked),
        ),
        next_step=f"correct the peer that {ranks_phrase(ranks)} computes at {where}",
    )
