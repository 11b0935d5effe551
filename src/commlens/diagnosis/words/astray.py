"""Words about a send and a receive that never meet."""

from __future__ import annotations

from commlens.diagnosis.align.alignment import Mismatch, PartingTags, UsualDistance, UsualPeer
from commlens.text import count


def messages_part(mismatch: Mismatch) -> str:
    """``"rank 0 sent to rank 1 with tag 3, but rank 1 receives with tag 2"``."""
    assert mismatch.astray is not None and mismatch.pair is not None
    send, recv = mismatch.pair
    sender, receiver = mismatch.ops
    match mismatch.astray.fault:
        case "other-tag":
            return (
                f"rank {sender} sent to rank {receiver} with tag {send.tag}, but rank {receiver}"
                f" receives with tag {recv.tag}"
            )
        case "wrong-destination":
            return (
                f"rank {sender} sent to rank {send.peer}, which does not receive it; rank"
                f" {receiver} waits for a message from it"
            )
        case "wrong-source":
            return (
                f"rank {receiver} waits for a message from rank {recv.peer}, which sends none, and"
                f" does not receive the one from rank {sender}"
            )


def why_astray(mismatch: Mismatch) -> list[str]:
    """Return the sentence that tells why one side is blamed; none if nothing tells."""
    if mismatch.astray is None or mismatch.pair is None:
        return []
    sender, receiver = mismatch.ops
    op = mismatch.pair[mismatch.astray.fault == "wrong-source"].op
    to = "to" if op == "send" else "from"
    match mismatch.astray.reason:
        case PartingTags(last, sent, received):
            return [f"After tag {last}, rank {sender} used {sent}, rank {receiver} {received}."]
        case UsualPeer(rank, peer):
            return [f"Until then, rank {rank} issued this {op} {to} rank {peer}."]
        case UsualDistance(places, at_line):
            each = "At this line, each" if at_line else "Each"
            where = f"{count(abs(places), 'place')} {'after' if places > 0 else 'before'}"
            return [
                f"{each} of the others issues a {op} {to} the rank {where} its own in the group."
            ]
        case None:
            return []
