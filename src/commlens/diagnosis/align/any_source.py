"""Receives from any source: which messages they took, and from which receives they took them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.matching.point_to_point import Pair, pair_messages
from commlens.model.collective import ChannelKey, Collective, State


@dataclass
class Taken:
    """A receive that names a sender, after a receive from any source took that sender's message."""

    receive: Collective  # names its sender
    taker: Collective  # the receive from any source
    sent: Collective  # the message that it took
    rival: Collective  # a message of another rank that it could have taken, and that nobody takes
    rival_rank: int
    races: bool  # nothing orders the two messages


def pair_with_any_source(sender: RankView, receiver: RankView, key: ChannelKey) -> list[Pair]:
    """Pair the messages from one rank to another as :func:`pair_messages` does, with the receives
    from any source that took one of them.
    """
    sends = sender.pairs.get((key, receiver.rank, "send"), [])
    receives = receiver.pairs.get((key, sender.rank, "recv"), [])
    complete = not (sender.wrapped or receiver.wrapped)
    if not complete or not _from_any(receiver, key) or not _sources_known(receiver, key):
        return pair_messages(sends, receives, complete=complete)
    took = [op for op in _from_any(receiver, key) if op.took_from == sender.rank]
    received = sorted((*receives, *took), key=lambda op: op.index)
    pairs: list[Pair] = []
    for tag in sorted({op.tag for op in (*sends, *received)}):
        pairs += zip_longest(
            [op for op in sends if op.tag == tag], [op for op in received if op.tag == tag]
        )
    return pairs


def find_taken(job: JobIndex, view: RankView, receive: Collective) -> Taken | None:
    """Return by which receive from any source the message of a waiting receive was taken; None if
    it was not, or if the program may have learned the sender from the receive from any source.
    """
    key, sender = receive.channel.key, job.views.get(-1 if receive.peer is None else receive.peer)
    if sender is None or view.wrapped or sender.wrapped or not _sources_known(view, key):
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
    for op in reversed(_from_any(view, receive.channel.key)):
        if op.index < receive.index and (op.took_from, op.tag) == wanted:
            return op
    return None


def _from_any(view: RankView, key: ChannelKey) -> list[Collective]:
    return view.pairs.get((key, -1, "recv"), [])


def _sources_known(view: RankView, key: ChannelKey) -> bool:
    """Return whether the records tell whose message each receive from any source took."""
    return all(
        op.took_from is not None or op.in_flight or op.state is State.FAILED
        for op in _from_any(view, key)
    )


def _names_latest_source(view: RankView, receive: Collective) -> bool:
    """Return whether earlier receives at this line named the rank whose message the receive from
    any source before them took: a header from any rank, and the rest of the message from the same.
    """
    from_any = _from_any(view, receive.channel.key)
    for (key, peer, direction), ops in view.pairs.items():
        if key != receive.channel.key or direction != "recv" or peer < 0:
            continue
        for op in ops:
            if op.index < receive.index and op.call_lines == receive.call_lines:
                before = [one for one in from_any if one.index < op.index]
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
    for key, peer, direction in list(view.pairs):
        other = job.views.get(peer)
        if direction == "send" and other is not None and other is not view:
            pairs = pair_with_any_source(view, other, key)
            met = next(
                (taker for send, taker in pairs if send and taker and send.index > index), None
            )
            if met is not None:
                yield peer, met.index
