"""Words about receives whose message a receive from any source took."""

from __future__ import annotations

from commlens.diagnosis.causes.any_source import FoundTakenMessage
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.text import frame_phrase


def words(context: Context, found: FoundTakenMessage) -> Words:
    """Return what a finding says about a message that a receive from any source took."""
    cause, taken = found.cause, found.taken
    rank, sender, rival = cause.rank, taken.receive.peer, cause.other_sender
    here, there, sent, other = (
        frame_phrase(op.source) or "an unknown line"
        for op in (taken.receive, taken.taker, taken.sent, taken.rival)
    )
    summary = (
        f"rank {rank} waits for a message from rank {sender} at {here}, but its receive from any"
        f" source at {there} took that message"
    )
    told = (
        f"Rank {sender} sent it at {sent}. Rank {rival} sent one, too, at {other}, which rank"
        f" {rank} does not receive."
    )
    race = (
        "Nothing orders the two messages: the receive from any source may take either."
        if cause.races
        else ""
    )
    return Words(
        summary=summary,
        explanation=prose(told, race, phrases.waiting_behind(context, [rank], found.blocked)),
        next_step=(
            f"name the sender at {there}, use another tag for the messages that are received from"
            f" any source, or take the sender at {here} from the result of recv"
        ),
        would_raise_confidence=(
            f"It is not known whether rank {sender} should have sent another message."
        ),
    )
