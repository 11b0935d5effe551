"""Find messages that never meet their receive: a receive from any source took them, the tags
differ, or one side names the wrong rank.

A message is taken (:class:`Taken`) if rank 0 calls ``recv(src=None)`` and then ``recv(src=1)``,
ranks 1 and 2 send it one message each, and the first receive takes that of rank 1. Then the second
one waits for ever, and the message of rank 2 is left over.

A message is astray (:class:`Astray`) if in a ring, where each rank sends to the next one, rank 3
sends to rank 5, which receives from rank 4. Rank 4 waits for rank 3's message, so rank 3 names the
wrong destination. A send that is not received yet is no fault, and neither is a receive that waits.
So the other side must be stuck or have ended, too, and one of the two must depart from its own tags
or peers, or from the distance that the other ranks keep.
"""

from __future__ import annotations

from bisect import bisect_right
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
from commlens.model.collective import ChannelKey, Collective, LearnedHow, State
from commlens.model.ops import SENT_BY_ROOT, SENT_TO_ROOT

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
    assert receive.peer is not None
    key, sender = receive.channel.key, job.views.get(receive.peer)
    if sender is None or view.wrapped or sender.wrapped or not sources_known(view, key):
        return None
    taker = _latest_taker(view, receive)
    if taker is None or _names_latest_source(view, receive):
        return None
    sent_to = {id(by): send for send, by in pair_with_any_source(sender, view, key) if by and send}
    sent = sent_to.get(id(taker))
    if sent is None or id(receive) in sent_to:
        return None
    rival = next(_left_over(job, view, receive), None)
    if rival is None:
        return None
    taken = (sender.rank, sent)
    ordered = _is_before(job, taken, rival) or _is_before(job, rival, taken)
    return Taken(receive, taker, sent, rival[1], rival_rank=rival[0], races=not ordered)


def _latest_taker(view: RankView, receive: Collective) -> Collective | None:
    """Return the last receive from any source before ``receive`` that took a message of the same
    sender and tag.
    """
    wanted = (receive.peer, receive.tag)
    takers = (
        op
        for op in reversed(from_any(view, receive.channel.key))
        if op.index < receive.index and (op.took_from, op.tag) == wanted
    )
    return next(takers, None)


def _names_latest_source(view: RankView, receive: Collective) -> bool:
    """Return whether an earlier receive at this line named the rank whose message the receive from
    any source before it took. So do programs that receive a header from any rank, and then the rest
    of the message from the rank that sent the header.
    """
    for op in _earlier_at_line(view, receive):
        before = [one for one in from_any(view, op.channel.key) if one.index < op.index]
        if before and op.peer is not None and before[-1].took_from == op.peer:
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
    """Return whether a rank could issue ``second`` only after another one had issued ``first``,
    since collectives or messages lead from one to the other.

    If rank 1 issues the send ``first`` as #4 and an all_reduce as #5, which is #9 of rank 2, all
    that rank 2 issues after #9 comes after ``first``. From #9 on, rank 2 may hold back other ranks.
    """
    reached = {first[0]: first[1].index}  # by rank: all that it issued later comes after `first`
    todo = [first[0]]
    while todo:
        rank = todo.pop()
        for other, index in _held_back(job, job.views[rank], reached[rank]):
            if index < reached.get(other, index + 1):
                reached[other] = index
                todo.append(other)
    return second[0] in reached and reached[second[0]] < second[1].index


def _held_back(job: JobIndex, view: RankView, index: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks that waited until this one had issued a record after ``index``, and for each
    the index of its last record before that wait was over.
    """
    for key, track in view.tracks.items():
        later = [number for number, op in sorted(track.ops.items()) if op.index > index]
        for member, theirs in job.tracks_on(key).items():
            waits = (
                theirs.ops[number]
                for number in later
                if number in theirs.ops and _needs(member, theirs.ops[number], view.rank)
            )
            yield from _end_of_first_wait(job.views[member], waits)
    for key, peer, direction in list(view.pairs):
        if direction == "send" and peer in job.views:
            pairs = pair_with_any_source(view, job.views[peer], key)
            waits = (taker for send, taker in pairs if send and taker and send.index > index)
            yield from _end_of_first_wait(job.views[peer], waits)


def _needs(rank: int, op: Collective, other: int) -> bool:
    """Return whether a collective cannot end on ``rank`` before ``other`` has come to it. A
    broadcast ends on its root at once, and on the others without one another.
    """
    if op.op in SENT_BY_ROOT:
        return op.args.root == other
    return op.args.root == rank or op.op not in SENT_TO_ROOT


def _end_of_first_wait(view: RankView, waits: Iterator[Collective]) -> Iterator[tuple[int, int]]:
    """Yield the rank, with the index of its last record before it had waited for the first of these
    ops. Until a rank waits for an asynchronous op, it issues others.
    """
    for op in waits:
        blocks = op.learned_how is LearnedHow.RETURN
        ended_ns = op.wait_ended_ns or (op.returned_ns if blocks else 0)
        # a wait for an op on a device holds back the device only, and one that fails nothing
        if ended_ns and not op.channel.runs_ahead and op.state is not State.FAILED:
            place = bisect_right(view.history, ended_ns, key=lambda one: one.announced_ns)
            yield view.rank, view.history[place - 1].index
            return


# --- the tags differ, or one side names the wrong rank

_MESSAGES_MAX = 256  # that are examined: in a ring of thousands of ranks, each has a stuck one
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
    """Yield the messages in which a thread is stuck or failed, with their ranks."""
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
    """Return why a stuck message never meets its other side; None if it may still do so."""
    assert op.peer is not None
    other, key, sends = job.views[op.peer], op.channel.key, op.op == "send"
    sender, receiver = (view, other) if sends else (other, view)
    has_met = all(one is not op for one in _unmatched(sender, receiver, key, received=not sends))
    if not _is_stuck(other) or has_met:
        return None
    waiting = _unmatched(sender, receiver, key, received=sends)
    if waiting:
        send, recv = (op, waiting[0]) if sends else (waiting[0], op)
        return _other_tag(job, sender, receiver, send, recv)
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
    waiting = _unmatched(*pair, op.channel.key, received=sends)
    if not waiting:
        return None
    here, there = (view.rank, op), (usual.rank, waiting[0])
    sent, received = (here, there) if sends else (there, here)
    astray = Astray("wrong-destination" if sends else "wrong-source", expected.reason)
    return _mismatch(job, sent, received, (view.rank,), astray)


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
                sent, received = (sender.rank, send), (receiver.rank, recv)
                astray = Astray("wrong-destination", expected.reason)
                return _mismatch(job, sent, received, (sender.rank,), astray)
    return None


def _is_stuck(view: RankView) -> bool:
    """Return whether a rank cannot issue anything any more, and not because it died."""
    return not view.died and (
        view.exit.kind in ("clean", "leaving") or any(block.stuck for block in view.blocks.values())
    )


def _unmatched(
    sender: RankView, receiver: RankView, key: ChannelKey, *, received: bool
) -> list[Collective]:
    """Return the sends without a receive or, with ``received``, the receives without a send, oldest
    first.
    """
    pairs = [(pair[received], pair[not received]) for pair in pair_by_peer(sender, receiver, key)]
    return sorted(
        (op for op, other in pairs if op is not None and other is None), key=lambda op: op.index
    )


def _other_tag(
    job: JobIndex, sender: RankView, receiver: RankView, send: Collective, recv: Collective
) -> RecordMismatch | None:
    """Return the mismatch of a send and a receive whose tags do not meet. If all tags before were
    the same on both sides, blame the side that leaves their order: of the tags 0, 1, 2, 4 that were
    sent and 0, 1, 2, 3 that are expected, the sender's 4.
    """
    key = recv.channel.key
    met = {
        one.tag
        for one, other in pair_by_peer(sender, receiver, key)
        if one is not None and other is not None
    }
    if send.tag in met and recv.tag in met:
        return None  # both tags are in use, so the message with the other one may still come
    sent = sender.pairs[key, receiver.rank, "send"]
    received = receiver.pairs[key, sender.rank, "recv"]
    same_tags = takewhile(
        lambda pair: pair[0].tag == pair[1].tag, zip(sent, received, strict=False)
    )
    same = sum(1 for _ in same_tags)
    left: list[int] = []
    reason = None
    if 1 < same < min(len(sent), len(received)):
        sides = {sender.rank: sent, receiver.rank: received}
        fits = {rank: _last_tag_fits(ops[: same + 1]) for rank, ops in sides.items()}
        left = [rank for rank, fit in fits.items() if fit is False and True in fits.values()]
        reason = PartingTags(sent[same - 1].tag, sent[same].tag, received[same].tag)
    odd, _ = by_routine([[sender.rank], [receiver.rank]], left) or UNDECIDED
    astray = Astray("other-tag", reason)
    return _mismatch(job, (sender.rank, send), (receiver.rank, recv), odd, astray)


def _last_tag_fits(ops: list[Collective]) -> bool | None:
    """Return whether the last tag continues the others; None if these do not decide, or are of
    other lines. Tags may stay the same, be counted up, or return after some steps.
    """
    if all(op.call_lines != ops[-1].call_lines for op in ops[:-1]):
        return None
    further = [after.tag - before.tag for before, after in pairwise(ops)]
    if len(set(further[:-1])) == 1:
        return further[-1] == further[0]
    return follows_history(further, len(further) - 1)


class _Expected(NamedTuple):
    """The rank with which a message was to be exchanged, and the reason to expect it."""

    rank: int
    reason: UsualPeer | UsualDistance


def _usual_peer(job: JobIndex, view: RankView, op: Collective) -> _Expected | None:
    """Return the rank with which a message was to be exchanged, if that is another one than it
    names. It is the peer of the rank's earlier messages from this line. If the rank issued none
    there, it is the one at the distance that the others keep.
    """
    ranks = op.channel.key[2]
    before = [one.peer for one in _earlier_at_line(view, op)]
    if before:
        usual = before[0]
        # one message shows no habit; and a line may choose another peer each time
        is_habit = len(before) > 1 and len(set(before)) == 1
        if usual is None or usual == op.peer or not is_habit:
            return None
        return _Expected(usual, UsualPeer(view.rank, usual))
    distance, at_line = _usual_distance(job, view, op)
    if distance is None:
        return None
    there = ranks[(ranks.index(view.rank) + distance) % len(ranks)]
    if there == op.peer:
        return None
    places = distance if distance * 2 <= len(ranks) else distance - len(ranks)
    return _Expected(there, UsualDistance(places, at_line))


def _usual_distance(job: JobIndex, view: RankView, op: Collective) -> tuple[int | None, bool]:
    """Return how many places after its own rank each other rank's messages in this direction go, if
    it is the same for all: of the messages from this line; else of all, if every rank has some.

    Returns:
        The distance in the group, or None; and whether it is that of the messages from this line.
    """
    ranks = op.channel.key[2]
    others = (job.views[rank] for rank in ranks if rank != view.rank and rank in job.views)
    messages = {other.rank: _same_direction(other, op) for other in islice(others, _OTHERS_MAX)}
    at_line = {
        rank: [one for one in ops if one.call_lines == op.call_lines]
        for rank, ops in messages.items()
    }
    distance = _same_distance(ranks, at_line)
    if distance is not None or not all(messages.values()):
        return distance, True
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


def _earlier_at_line(view: RankView, op: Collective) -> list[Collective]:
    """Return the rank's earlier messages like this one from the same lines."""
    return [
        one
        for one in _same_direction(view, op)
        if one.call_lines == op.call_lines and one.index < op.index
    ]


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
