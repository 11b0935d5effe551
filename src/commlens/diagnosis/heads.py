"""Where ranks of other tools' dumps are stuck: what they have issued, what has arrived, which message meets which.

Such a recorder knows no threads. A rank is stuck in its *head*, the first operation that has not ended; what it enqueued behind
the head has not arrived. For black boxes nothing of this applies.
"""

from __future__ import annotations

from commlens.diagnosis.index import View
from commlens.model.collective import ChannelKey, Collective


def meets(view: View, other: View, key: ChannelKey, op: Collective) -> Collective | None:
    """The other side of a message in flight, in flight there as well; None where the other rank has not come to it.

    Both sides count from the last message that ended, since older ones may have been overwritten. Where none was, they count
    from the beginning.
    """
    back = "recv" if op.op == "send" else "send"
    mine, theirs = view.pairs[(key, other.rank, op.op)], other.pairs.get((key, view.rank, back), [])
    place = next(i for i, one in enumerate(mine) if one is op)
    if not view.wrapped and not other.wrapped:
        place += view.sent.get((key, other.rank, op.op), 0) - other.sent.get((key, view.rank, back), 0)
        if place < 0:
            return op  # it has ended there
    return theirs[place] if place < len(theirs) else None


def has_issued(view: View, key: ChannelKey, number: int, since_ns: int) -> bool | None:
    """Whether a rank without a record of a collective has issued it; None where nobody can say.

    Args:
        view: the rank.
        key: the collective's channel.
        number: its number.
        since_ns: when another rank issued it.
    """
    track = view.tracks.get(key)
    if view.columns is None:
        return None if track is None and view.wrapped and view.log.collectives else False
    status = view.columns.extract.status.get(key[1])
    mixed = any(pair[0] == key for pair in (*view.pairs, *view.sent))  # then the status counts messages, too
    if status is not None and not mixed and number <= status[0]:
        return True
    return None if track is None and view.first_ns > since_ns else False


def is_behind(view: View, op: Collective) -> bool:
    """Whether the rank has only enqueued it behind the operation in which it is stuck."""
    head = view.blocks.get(0) if view.columns is not None else None
    if head is None or not op.in_flight or op.index in view.running:
        return False
    return head.op.index < op.index and all(part is not op for part in head.parts)
