"""Messages that never meet their receive: the tags differ, one side names the wrong rank, or a
receive from any source took them.

A send that is not received yet is no fault, and neither is a receive that waits. So a message is
astray only if the other side is stuck or has ended, and if one of the two departs from its own tags
or peers, or from the distance that the other ranks keep: in a ring of 8 ranks, each sends to the
next one, and rank 3 sends to rank 5, which receives from rank 4. Rank 4 waits for rank 3's message,
so rank 3 names the wrong destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

from commlens.diagnosis.align.alignment import (
    Astray,
    PartingTags,
    RecordMismatch,
    UsualDistance,
    UsualPeer,
    from_any,
    pair_by_peer,
    pair_with_any_source,
    sources_known,
)
from commlens.diagnosis.align.routine import follows_history
from commlens.diagnosis.align.tie_break import UNDECIDED, by_routine
from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.matching.answer import Disagree, Party, Severity
from commlens.model.collective import ChannelKey, Collective

# --- a receive from any source took the message


@dataclass
class Taken:
    """A receive that names a sender, after a receive from any source took that sender's message."""

    receive: Collective  # names its sender
    taker: Collective  # the receive from any source
    sent: Collective  # the message that it took
    rival: Collective  # a message of another rank that it could have taken, and that no rank takes
    rival_rank: int
    races: bool  # nothing orders the two messages


def find_taken(job: JobIndex, view: RankView, receive: Collective) -> Taken | None:
    """Return by which receive from any source the message of a waiting receive was taken; None if
    it was not, or if the program may have learned the sender from the receive from any source.
    """
    key, sender = receive.channel.key, job.views.get(-1 if receive.peer is None else receive.peer)
    if sender is None or view.wrapped or sender.wrapped or not sources_known(view, key):
        return None
    taker = _latest_taker(view, receive)
    if taker is None or _names_latest_source(view, receive):
        return None
    senders = {id(by): send for send, by in pair_with_any_source(sender, view, key) if by and send}
    sent = senders.get(id(taker))
    if sent is None or id(receive) in senders:
        return None
    rival = next(_left_over(job, view, receive), None)
    if rival is None:
        return None
    taken = (sender.rank, sent)
    ordered = _is_before(job, taken, rival) or _is_before(job, rival, taken)
    return Taken(receive, taker, sent, rival[1], rival_rank=rival[0], races=not ordered)


def _latest_taker(view: RankView, receive: Collective) -> Collective | None:
    """Return the last receive from any source before ``receive`` that took such a message."""
    wanted = (receive.peer, receive.tag)
    for op in reversed(from_any(view, receive.channel.key)):
        if op.index < receive.index and (op.took_from, op.tag) == wanted:
            return op
    return None


def _names_latest_source(view: RankView, receive: Collective) -> bool:
    """Return whether earlier receives at this line named the rank whose message the receive from
    any source before them took: a header from any rank, and the rest of the message from the same.
    """
    earlier = from_any(view, receive.channel.key)
    for (key, peer, direction), ops in view.pairs.items():
        if key != receive.channel.key or direction != "recv" or peer < 0:
            continue
        for op in ops:
            if op.index < receive.index and op.call_lines == receive.call_lines:
                before = [one for one in earlier if one.index < op.index]
                if before and before[-1].took_from == peer:
                    return True
    return False


def _left_over(
    job: JobIndex, view: RankView, receive: Collective
) -> Iterator[tuple[int, Collective]]:
    """Yield the messages of other ranks that a receive from any source with this tag could take,
    and that this rank does not receive.
    """
    key = receive.channel.key
    for rank in key[2]:
        other = job.views.get(rank)
        if other is None or rank in (view.rank, receive.peer) or other.wrapped:
            continue
        for send, taker in pair_with_any_source(other, view, key):
            if send is not None and taker is None and send.tag == receive.tag:
                yield rank, send


def _is_before(
    job: JobIndex, first: tuple[int, Collective], second: tuple[int, Collective]
) -> bool:
    """Return whether a rank issued ``second`` only after another one had issued ``first``, since
    collectives or messages between the ranks order the two.
    """
    reached = {first[0]: first[1].index}  # by rank: all that it issued later comes after `first`
    todo = [first[0]]
    while todo:
        rank = todo.pop()
        for other, index in _ordered_by(job, job.views[rank], reached[rank]):
            if index < reached.get(other, index + 1):
                reached[other] = index
                todo.append(other)
    return second[0] in reached and reached[second[0]] < second[1].index


def _ordered_by(job: JobIndex, view: RankView, index: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks that met this one after its record ``index``, with the record of each in
    which they first did.
    """
    for key, track in view.tracks.items():
        number = min((number for number, op in track.ops.items() if op.index > index), default=0)
        for member, theirs in job.tracks_on(key).items():
            met = theirs.ops.get(number)
            if met is not None and member != view.rank:
                yield member, met.index
    others = job.views.keys() - {view.rank}
    for key, peer, direction in list(view.pairs):
        if direction == "send" and peer in others:
            pairs = pair_with_any_source(view, job.views[peer], key)
            yield from [
                (peer, taker.index)
                for send, taker in pairs
                if send and taker and send.index > index
            ][:1]


# --- the tags differ, or one side names the wrong rank

_MESSAGES_MAX = 256  # of a ring of thousands of ranks, each has one that is stuck
_OTHERS_MAX = 16  # ranks whose distances are compared


def find_astray(job: JobIndex) -> list[RecordMismatch]:
    """Return a mismatch for each send or receive that is stuck because its message went astray.
    Only for black boxes.
    """
    if job.foreign:
        return []
    found: dict[tuple[int, int], RecordMismatch] = {}
    for view, op in islice(_stuck_messages(job), _MESSAGES_MAX):
        mismatch = _find_misdirected(job, view, op)
        if mismatch is not None and mismatch.pair is not None:
            found.setdefault((id(mismatch.pair[0]), id(mismatch.pair[1])), mismatch)
    return list(found.values())


def _stuck_messages(job: JobIndex) -> Iterator[tuple[RankView, Collective]]:
    for _, view in sorted(job.views.items()):
        for _, block in sorted(view.blocks.items()):
            if block.stuck and not view.died:
                yield from (
                    (view, op)
                    for op in block.parts
                    if op.is_point_to_point
                    and op.sequence_number
                    and (op.in_flight or block.how == "failed")
                    and op.peer != view.rank
                    and op.peer in job.views
                )


def _find_misdirected(job: JobIndex, view: RankView, op: Collective) -> RecordMismatch | None:
    assert op.peer is not None
    other, key, sends = job.views[op.peer], op.channel.key, op.op == "send"
    pair = (view, other) if sends else (other, view)
    if not _is_stuck(other) or all(
        one is not op for one in _unmatched(*pair, key, received=not sends)
    ):
        return None
    left = _unmatched(*pair, key, received=sends)
    if left:
        return _other_tag(job, *pair, *((op, left[0]) if sends else (left[0], op)))
    return _named_wrong_rank(job, view, op) or (
        None if sends else _sent_elsewhere(job, other, view, op)
    )


def _named_wrong_rank(job: JobIndex, view: RankView, op: Collective) -> RecordMismatch | None:
    """Return the mismatch of a message that names another rank than usual, while the usual one
    waits for it, or has sent to this rank.
    """
    expected, sends = _usual_peer(job, view, op), op.op == "send"
    usual = job.views.get(expected.rank) if expected is not None else None
    if expected is None or usual is None or usual is view:
        return None
    pair = (view, usual) if sends else (usual, view)
    left = _unmatched(*pair, op.channel.key, received=sends)
    if left and sends:
        return _to_wrong_rank(job, view, op, usual, left[0], expected.reason)
    if left:
        astray = Astray("wrong-source", expected.reason)
        return _mismatch(job, (usual.rank, left[0]), (view.rank, op), (view.rank,), astray)
    return None


def _sent_elsewhere(
    job: JobIndex, sender: RankView, receiver: RankView, recv: Collective
) -> RecordMismatch | None:
    """Return the mismatch of a receive whose message was sent to a rank that does not receive
    it.
    """
    key = recv.channel.key
    for peer in sorted(peer for of, peer, way in sender.pairs if (of, way) == (key, "send")):
        if peer not in job.views or not _is_stuck(job.views[peer]):
            continue
        for send in _unmatched(sender, job.views[peer], key, received=False)[:1]:
            expected = _usual_peer(job, sender, send)
            if expected is not None and expected.rank == receiver.rank:
                return _to_wrong_rank(job, sender, send, receiver, recv, expected.reason)
    return None


def _is_stuck(view: RankView) -> bool:
    """Return whether a rank cannot issue anything any more, and not because it died."""
    return not view.died and (
        view.exit.kind in ("clean", "leaving") or any(block.stuck for block in view.blocks.values())
    )


def _unmatched(
    sender: RankView, receiver: RankView, key: ChannelKey, *, received: bool
) -> list[Collective]:
    """Return the sends without a receive, or the receives without a send, oldest first."""
    pairs = [(pair[received], pair[not received]) for pair in pair_by_peer(sender, receiver, key)]
    return sorted(
        (op for op, other in pairs if op is not None and other is None), key=lambda op: op.index
    )


def _other_tag(
    job: JobIndex, sender: RankView, receiver: RankView, send: Collective, recv: Collective
) -> RecordMismatch | None:
    """Return the mismatch of a send and a receive whose tags do not meet; blame the side that
    leaves the order of the tags.
    """
    key = recv.channel.key
    met = {
        one.tag
        for one, other in pair_by_peer(sender, receiver, key)
        if one is not None and other is not None
    }
    if send.tag in met and recv.tag in met:
        return None  # both tags are in use, so the message with the other one may still come
    sides = {
        sender.rank: sender.pairs[key, receiver.rank, "send"],
        receiver.rank: receiver.pairs[key, sender.rank, "recv"],
    }
    same = sum(
        1
        for _ in takewhile(
            lambda pair: pair[0].tag == pair[1].tag, zip(*sides.values(), strict=False)
        )
    )
    left: list[int] = []
    reason = None
    if 1 < same < min(map(len, sides.values())):
        fits = {rank: _last_tag_fits(ops[: same + 1]) for rank, ops in sides.items()}
        left = [rank for rank, fit in fits.items() if fit is False and True in fits.values()]
        sent, received = sides.values()
        reason = PartingTags(sent[same - 1].tag, sent[same].tag, received[same].tag)
    odd, _ = by_routine([[rank] for rank in sides], left) or UNDECIDED
    astray = Astray("other-tag", reason)
    return _mismatch(job, (sender.rank, send), (receiver.rank, recv), odd, astray)


def _last_tag_fits(ops: list[Collective]) -> bool | None:
    """Return whether the last tag continues the others, which may be counted up; None if they do
    not tell, or are of other lines.
    """
    if all(op.call_lines != ops[-1].call_lines for op in ops[:-1]):
        return None
    further = [after.tag - before.tag for before, after in pairwise(ops)]
    return (
        further[-1] == further[0]
        if len(set(further[:-1])) == 1
        else follows_history(further, len(further) - 1, sure=True)
    )


class _Expected(NamedTuple):
    """The rank with which a message was to be exchanged, and the reason to expect it."""

    rank: int
    reason: UsualPeer | UsualDistance


def _usual_peer(job: JobIndex, view: RankView, op: Collective) -> _Expected | None:
    """Return the rank with which a rank used to exchange messages from a line, else the one at the
    distance that the others keep; None if there is none, or if the op is with that rank.
    """
    ranks = op.channel.key[2]
    before = [
        one.peer
        for one in _same_direction(view, op)
        if one.call_lines == op.call_lines and one.index < op.index
    ]
    if before:
        known = before[0]
        if len(before) < 2 or len(set(before)) > 1 or known is None or known == op.peer:
            return None
        return _Expected(known, UsualPeer(view.rank, known))
    after, at_line = _usual_distance(job, view, op)
    if after is None:
        return None
    usual = ranks[(ranks.index(view.rank) + after) % len(ranks)]
    if usual == op.peer:
        return None
    places = after if after * 2 <= len(ranks) else after - len(ranks)
    return _Expected(usual, UsualDistance(places, at_line))


def _usual_distance(job: JobIndex, view: RankView, op: Collective) -> tuple[int | None, bool]:
    """Return the distance in the group of the other ranks' messages, if it is the same for all: of
    those from this line, else of all in this direction, where every rank has some.

    Returns:
        The distance, or None; and whether it is that of the messages from this line.
    """
    ranks = op.channel.key[2]
    others = (job.views[rank] for rank in ranks if rank != view.rank and rank in job.views)
    messages = {other.rank: _same_direction(other, op) for other in islice(others, _OTHERS_MAX)}
    at_line = {
        rank: [one for one in ops if one.call_lines == op.call_lines]
        for rank, ops in messages.items()
    }
    after = _same_distance(ranks, at_line)
    if after is not None or not all(messages.values()):
        return after, True
    return _same_distance(ranks, messages), False


def _same_distance(
    ranks: Sequence[int], messages: Mapping[int, Sequence[Collective]]
) -> int | None:
    """Return the distance in a group that all messages of several ranks have; None if they
    differ.
    """
    place = {rank: i for i, rank in enumerate(ranks)}
    of_each = [
        {(place[op.peer] - place[rank]) % len(ranks) for op in ops if op.peer in place}
        for rank, ops in messages.items()
    ]
    distances = set().union(*of_each)
    return distances.pop() if len(distances) == 1 and sum(map(len, of_each)) > 1 else None


def _same_direction(view: RankView, op: Collective) -> list[Collective]:
    """Return the rank's messages of the same direction and channel."""
    key = op.channel.key
    return [
        one
        for (of, _, direction), ops in view.pairs.items()
        if of == key and direction == op.op
        for one in ops
    ]


def _to_wrong_rank(
    job: JobIndex,
    sender: RankView,
    send: Collective,
    receiver: RankView,
    recv: Collective,
    reason: UsualPeer | UsualDistance,
) -> RecordMismatch:
    astray = Astray("wrong-destination", reason)
    return _mismatch(job, (sender.rank, send), (receiver.rank, recv), (sender.rank,), astray)


def _mismatch(
    job: JobIndex,
    sent: tuple[int, Collective],
    received: tuple[int, Collective],
    culprits: tuple[int, ...],
    astray: Astray,
) -> RecordMismatch:
    (sender, send), (receiver, recv) = sent, received
    parties = (Party((sender,), "sends"), Party((receiver,), "receives"))
    answer = Disagree("p2p", Severity.ILLEGAL, culprits, parties, detail="")
    key, ops = recv.channel.key, {sender: send, receiver: recv}
    return RecordMismatch(
        key,
        job.channels[key],
        recv.sequence_number,
        ops,
        answer,
        culprits or tuple(sorted(ops)),
        "routine" if culprits else "undecided",
        pair=(send, recv),
        astray=astray,
    )
