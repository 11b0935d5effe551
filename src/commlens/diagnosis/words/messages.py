"""Words about messages that cannot meet: "rank 0 sent to rank 1 with tag 3, but rank 1 receives
with tag 2".
"""

from __future__ import annotations

from commlens.diagnosis.align.alignment import PartingTags, RecordMismatch, UsualDistance, UsualPeer
from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.messages import TakenCase
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import NoSuchPeer
from commlens.text import capital, count, frame_phrase, group_phrase, rank_phrase, ranks_phrase


def messages_part(mismatch: RecordMismatch) -> str:
    """``"rank 0 sent to rank 1 with tag 3, but rank 1 receives with tag 2"``."""
    assert mismatch.astray is not None and mismatch.pair is not None
    send, recv = mismatch.pair
    sender, receiver = mismatch.ops
    match mismatch.astray.fault:
        case "other-tag":
            return (
                f"{rank_phrase(sender)} sent to {rank_phrase(receiver)} with tag"
                f" {send.tag}, but {rank_phrase(receiver)}"
                f" receives with tag {recv.tag}"
            )
        case "wrong-destination":
            return (
                f"{rank_phrase(sender)} sent to {rank_phrase(send.peer)}, which does not"
                " receive it;"
                f" {rank_phrase(receiver)} waits for a message from it"
            )
        case "wrong-source":
            return (
                f"{rank_phrase(receiver)} waits for a message from"
                f" {rank_phrase(recv.peer)}, which sends none, and"
                f" does not receive the one from {rank_phrase(sender)}"
            )


def why_astray(mismatch: RecordMismatch) -> list[str]:
    """Return the sentence that says why one side is blamed; an empty list if the reason is
    unknown.
    """
    if mismatch.astray is None or mismatch.pair is None:
        return []
    sender, receiver = mismatch.ops
    op = mismatch.pair[mismatch.astray.fault == "wrong-source"].op
    to = "to" if op == "send" else "from"
    match mismatch.astray.reason:
        case PartingTags(last, sent, received):
            return [
                f"After tag {last}, {rank_phrase(sender)} used {sent}, {rank_phrase(receiver)}"
                f" {received}."
            ]
        case UsualPeer(rank, peer):
            return [f"Until then, {rank_phrase(rank)} issued this {op} {to} {rank_phrase(peer)}."]
        case UsualDistance(places, at_line):
            each = "At this line, each" if at_line else "Each"
            where = f"{count(abs(places), 'place')} {'after' if places > 0 else 'before'}"
            return [
                f"{each} of the others issues a {op} {to} the rank {where} its own in the group."
            ]
        case None:
            return []


def words_of_taken(context: Context, case: TakenCase) -> Words:
    """Return what a finding says about a message that a receive from any source took."""
    cause, taken = case.cause, case.taken
    rank, sender, rival = cause.rank, taken.receive.peer, cause.other_sender
    here, there, sent, other = (
        frame_phrase(op.source) or "an unknown line"
        for op in (taken.receive, taken.taker, taken.sent, taken.rival)
    )
    summary = (
        f"{rank_phrase(rank)} waits for a message from {rank_phrase(sender)} at {here},"
        " but its receive from any"
        f" source at {there} took that message"
    )
    told = (
        f"{capital(rank_phrase(sender))} sent it at {sent}. {capital(rank_phrase(rival))}"
        f" sent one, too, at {other}, which"
        f" {rank_phrase(rank)} does not receive."
    )
    race = (
        "Nothing orders the two messages: the receive from any source may take either."
        if cause.races
        else ""
    )
    return Words(
        summary=summary,
        explanation=phrases.prose(told, race, phrases.blocked_behind([rank], case.blocked)),
        next_step=(
            f"name the sender at {there}, use another tag for the messages that are received from"
            f" any source, or take the sender at {here} from the result of recv"
        ),
        would_raise_confidence=(
            f"It is not known whether {rank_phrase(sender)} should have sent another message."
        ),
    )


def words_of_no_such_peer(context: Context, case: Case[NoSuchPeer]) -> Words:
    """Return what a finding says about messages to or from a rank that does not exist."""
    assert case.op is not None
    op, ranks = case.op, case.cause.ranks
    where = frame_phrase(op.source) or "an unknown line"
    does = "sends to" if op.op == "send" else "receives from"
    group = group_phrase(op.channel.group)
    return Words(
        summary=(
            f"{ranks_phrase(ranks)} {does if len(ranks) == 1 else f'each {does}'}"
            f" {rank_phrase(op.peer)} at {where}, which is not in {group}"
        ),
        explanation=phrases.prose(
            f"{capital(op.op)} #{op.sequence_number} cannot complete.",
            phrases.blocked_behind(ranks, case.blocked),
        ),
        next_step=f"correct the peer that {ranks_phrase(ranks)} computes at {where}",
    )
