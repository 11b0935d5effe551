"""Compare the records of ranks that met in a collective or a message: find the ranks that disagree
or are out of step, and decide which of them is to blame.

Ranks meet under the same sequence number of a channel. Say that under number 7 ranks 0, 1 and 3
issued an all_reduce of float32[4] and rank 2 one of float32[5]: that is one
:class:`RecordMismatch`, with number 7, the four records as ``ops``, and rank 2 as the culprit of
the majority. If ranks 0-3 issued the same, but rank 2 from other lines from number 7 on, since it
skipped a collective, there is a mismatch without an ``answer``, and with a ``shift``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Literal, NamedTuple

from commlens.diagnosis.align.out_of_step import Departure, Shift, departure_of, find_shifts
from commlens.diagnosis.align.peer_order import is_outvoted, like_other_groups
from commlens.diagnosis.align.routine import ranks_off_routine
from commlens.diagnosis.align.thread_race import Race, find_race, has_overlaps
from commlens.diagnosis.align.tie_break import (
    UNDECIDED,
    by_arguments,
    by_majority,
    by_other_groups,
    by_routine,
    first_decision,
)
from commlens.diagnosis.index.job_index import (
    JobIndex,
    RankView,
    Track,
    find_counterpart,
    is_queued,
)
from commlens.matching.answer import Answer, Disagree, Severity
from commlens.matching.collectives import compare_coalesced, compare_collectives
from commlens.matching.error_texts import is_refusal
from commlens.matching.point_to_point import Pair, compare_pair, pair_messages
from commlens.model.cause import BlamedBy, Decision
from commlens.model.collective import Channel, ChannelKey, Collective, CollectiveArgs, State

_RANKS_OF_A_SIDE = 16
"""Ranks whose records are looked at closely: each takes a while, and there may be thousands."""


# --- why a message never meets its receive: ``messages`` finds it


class PartingTags(NamedTuple):
    """The tags with which the two sides of a channel part."""

    last: int  # that both used
    sent: int
    received: int


class UsualPeer(NamedTuple):
    """A rank exchanged messages with one peer from this line until then: rank 2 with rank 3,
    whereas it now names rank 1.
    """

    rank: int
    peer: int


class UsualDistance(NamedTuple):
    """All others exchange messages with the rank at one distance in the group: each rank with the
    next one (1), whereas rank 2 now names rank 0.
    """

    places: int  # after the rank's own; negative: before it
    at_line: bool  # from the same line


class Astray(NamedTuple):
    """A send and a receive that never meet."""

    fault: Literal["other-tag", "wrong-destination", "wrong-source"]
    reason: PartingTags | UsualPeer | UsualDistance | None


# --- what is found


@dataclass
class RecordMismatch:
    """Ranks that disagree under one sequence number of a channel, or a rank that is out of step
    from that number on.
    """

    key: ChannelKey
    channel: Channel
    number: int
    ops: dict[int, Collective]  # by rank, of the ranks that met
    # None: the arguments agree, and only source lines and steps show that a rank is out of step
    answer: Disagree | None
    culprits: tuple[int, ...]  # sorted; on a tie, all ranks that met
    blamed_by: BlamedBy
    shift: Shift | None = None
    departure: Departure = ""  # whether the culprits skipped a collective or issued an extra one
    repeats: int = 0  # later mismatches that are the same
    silent: bool = False  # no rank hangs because of it
    uncertain: bool = False  # several threads issued the collectives, so their order is uncertain
    racing: Race | None = None  # what two threads of each rank issue in any order
    pair: tuple[Collective, Collective] | None = None  # a send and the receive that it met
    astray: Astray | None = None  # the two never meet

    @property
    def refused(self) -> bool:
        """Whether strict verification raised on a rank before anything was sent."""
        return any(op.state is State.FAILED and is_refusal(op.error) for op in self.ops.values())

    @property
    def tie(self) -> bool:
        """Return whether nothing chooses between the sides."""
        return self.blamed_by == "undecided"

    @property
    def others(self) -> list[int]:
        """Return the ranks that met the culprits, sorted; none on a tie."""
        return sorted(set(self.ops) - set(self.culprits))

    @property
    def own(self) -> Collective:
        """Return the op of the first culprit that has a record; if none has, of the first rank."""
        known = [self.ops[rank] for rank in self.culprits if rank in self.ops]
        return known[0] if known else next(iter(self.ops.values()))

    @property
    def usual(self) -> Collective | None:
        """Return what the first of the other ranks issued instead; None on a tie."""
        others = self.others
        return self.ops[others[0]] if others else None

    @property
    def breaks_channel(self) -> bool:
        """Return whether the ranks cannot go on together on the channel: they are out of step, or
        the backend hangs, crashes or corrupts.
        """
        is_illegal = self.answer is not None and self.answer.severity is Severity.ILLEGAL
        return self.shift is not None or is_illegal

    @property
    def may_cause_later_faults(self) -> bool:
        """Return whether later faults on the channel may follow from this one."""
        return self.refused or self.breaks_channel

    def explains(self, number: int, absent: Sequence[int]) -> bool:
        """Return whether a rank is stuck in the channel's ``number``, where the ranks ``absent``
        are missing, because of this mismatch.
        """
        if not self.may_cause_later_faults or number < self.number:
            return False
        if self.shift is not None or not absent or set(absent) <= set(self.culprits):
            return True
        return any(op.state is not State.COMPLETED for op in self.ops.values())


def align_records(job: JobIndex) -> list[RecordMismatch]:
    """Return the mismatches of all channels and pairs of ranks. Their order does not depend on the
    order of the logs.
    """
    mismatches = [mismatch for key in sorted(job.users) for mismatch in _align_channel(job, key)]
    mismatches += _pair_mismatches(job)
    return [one for one in mismatches if not (one.refused and _all_continued(job, one.ops))]


def _all_continued(job: JobIndex, ops: Mapping[int, Collective]) -> bool:
    """Return whether the program caught a refusal on all ranks, and continued: then it did no
    harm.
    """
    return all(
        view.exit.kind == "clean"
        or (not view.exit.failed and view.last_op is not None and view.last_op.index != op.index)
        for view, op in ((job.views[rank], op) for rank, op in ops.items())
    )


# --- collectives


def _align_channel(job: JobIndex, key: ChannelKey) -> list[RecordMismatch]:
    """Return the channel's mismatches by sequence number, up to the first rank out of step."""
    tracks = job.tracks_on(key)
    if len(tracks) < 2:
        return []
    shifts = find_shifts(job, key)
    mismatches = _disagreements(job, key, tracks, shifts)
    first = min(shifts, key=lambda shift: (shift.number, shift.rank), default=None)
    if first is None or any(
        mismatch.number == first.number or mismatch.racing is not None for mismatch in mismatches
    ):
        return mismatches  # the shift starts at one of them, whoever is blamed for that
    if has_overlaps(job.views[first.rank], key, first.number):
        return mismatches  # the order of two threads is no shift
    earlier = [mismatch for mismatch in mismatches if mismatch.number < first.number]
    return [*earlier, _out_of_step(job, key, tracks, shifts, first)]


def _disagreements(
    job: JobIndex, key: ChannelKey, tracks: Mapping[int, Track], shifts: Sequence[Shift]
) -> list[RecordMismatch]:
    """Return the collectives that the ranks disagree on, up to the first disagreement that hangs
    them.
    """
    comparison = _Comparison(tracks, key[2], splits_known=not job.foreign)
    mismatches: list[RecordMismatch] = []
    for number in _numbers_to_compare(job, tracks, shifts):
        met = _ops_at(tracks, number)
        answer = comparison.compare(number, met) if len(met) > 1 else None
        if not isinstance(answer, Disagree):
            continue
        mismatch = _disagreement(job, key, number, met, answer, shifts)
        same = next((each for each in mismatches if _is_repeat(each, mismatch)), None)
        if same is not None:
            same.repeats += 1
        else:
            mismatches.append(mismatch)
        if mismatch.breaks_channel and not mismatch.silent:
            break
    return mismatches


def _ops_at(tracks: Mapping[int, Track], number: int) -> dict[int, Collective]:
    return {rank: track.ops[number] for rank, track in tracks.items() if number in track.ops}


def _numbers_to_compare(
    job: JobIndex, tracks: Mapping[int, Track], shifts: Sequence[Shift]
) -> list[int]:
    """Return the sequence numbers to compare, ascending, up to the first at which a rank is
    shifted: from then on, its collectives pair up wrongly. If other ranks are shifted at the next
    numbers, these are compared, too.
    """
    if job.foreign:
        from commlens.diagnosis.index.columns import differing_numbers

        # The sizes of an all_to_all may differ between ranks, so it is not among the differing
        # numbers; but what one rank sends must be what the other expects.
        open_with_splits = {
            track.open[0]
            for track in tracks.values()
            if track.open and track.ops[track.open[0]].op == "all_to_all"
        }
        numbers = sorted(
            {*differing_numbers(track.ops for track in tracks.values()), *open_with_splits}
        )
    else:
        numbers = sorted({number for track in tracks.values() for number in track.ops})
    starts = {shift.number for shift in shifts}
    first = min(starts, default=math.inf)
    return list(takewhile(lambda number: number <= first or number in starts, numbers))


class _Comparison:
    """Compares the collectives that met under one sequence number, and equal combinations of
    arguments only once.
    """

    def __init__(
        self, tracks: Mapping[int, Track], group_ranks: Sequence[int], *, splits_known: bool
    ) -> None:
        self._tracks = tracks
        self._group_ranks = group_ranks
        self._splits_known = splits_known
        self._coalesced = {number for track in tracks.values() for number in track.members}
        self._codes: dict[CollectiveArgs, int] = {}  # the same for equal arguments
        # Hashing arguments is slow, and records share them. Each value holds its arguments, so that
        # no other object gets the same id.
        self._codes_by_id: dict[int, tuple[int, CollectiveArgs]] = {}
        self._answers: dict[tuple[tuple[int, int], ...], Answer] = {}

    def compare(self, number: int, met: Mapping[int, Collective]) -> Answer | None:
        """Compare the collectives of the ranks that met; None if all arguments are equal."""
        if number in self._coalesced:
            parts = {rank: self._tracks[rank].args_of(number) for rank in met}
            return compare_coalesced(parts, self._group_ranks, splits_known=self._splits_known)
        combination = tuple((rank, self._code(op.args)) for rank, op in met.items())
        if (
            len({code for _, code in combination}) == 1
            and next(iter(met.values())).op != "all_to_all"
        ):
            return None
        answer = self._answers.get(combination)
        if answer is None:
            args = {rank: op.args for rank, op in met.items()}
            answer = self._answers[combination] = compare_collectives(
                args, self._group_ranks, splits_known=self._splits_known
            )
        return answer

    def _code(self, args: CollectiveArgs) -> int:
        known = self._codes_by_id.get(id(args))
        if known is None:
            known = self._codes_by_id[id(args)] = (
                self._codes.setdefault(args, len(self._codes)),
                args,
            )
        return known[0]


def _disagreement(
    job: JobIndex,
    key: ChannelKey,
    number: int,
    met: Mapping[int, Collective],
    answer: Disagree,
    shifts: Sequence[Shift],
) -> RecordMismatch:
    racing = find_race(job, key, number, met, answer)
    completed = all(op.state is State.COMPLETED for op in met.values())
    mismatch = RecordMismatch(
        key,
        job.channels[key],
        number,
        dict(met),
        answer,
        culprits=(),
        blamed_by="undecided",
        silent=completed and not _is_stuck_after(job, key, number),
        uncertain=racing is not None or any(op.concurrent for op in met.values()),
        racing=racing,
    )
    if racing is None:
        _blame(job, mismatch, answer, [shift for shift in shifts if shift.number == number])
    return mismatch


def _blame(
    job: JobIndex, mismatch: RecordMismatch, answer: Disagree, here: Sequence[Shift]
) -> None:
    """Decide which ranks are to blame for a disagreement, and whether they are out of step.

    Args:
        job: the indexed ranks.
        mismatch: of ranks that disagree; gets the decision.
        answer: what they disagree in.
        here: the shifts that start at this number.
    """
    met = mismatch.ops
    decision = _decide(job, mismatch.key, mismatch.number, met, answer, here)
    sides = {rank for party in answer.parties for rank in party.ranks if rank in met}
    mismatch.culprits = tuple(sorted(decision.culprits or sides))
    mismatch.blamed_by = decision.by
    shift = here[0] if here else None
    is_by_rank = decision.by in ("other-groups", "routine")
    if shift is not None and is_by_rank and shift.rank not in decision.culprits:
        shift = None  # other ranks are blamed for the disagreement
    mismatch.shift = shift
    mismatch.departure = (
        _departure(job, mismatch, answer) if shift is None or mismatch.tie else shift.departure
    )


def _decide(
    job: JobIndex,
    key: ChannelKey,
    number: int,
    met: Mapping[int, Collective],
    answer: Disagree,
    here: Sequence[Shift],
) -> Decision:
    """Blame the ranks out of step, else those whose arguments are wrong in themselves, else the
    minority, else the ranks that depart from the other groups of this kind, else those that leave
    their routine.
    """
    out_of_step = tuple(sorted(shift.rank for shift in here))
    if here and here[0].other is None and set(out_of_step) <= set(met):
        return Decision(out_of_step, "majority")
    sides = [[rank for rank in party.ranks if rank in met] for party in answer.parties]
    usual = [rank for rank in met if rank not in answer.minority]
    return first_decision(
        lambda: by_arguments(answer.minority if answer.in_itself else ()),
        # Ranks that have not come can make the majority a minority.
        lambda: (
            None
            if is_outvoted(job, key, number, answer.minority)
            else by_majority([usual, answer.minority], of=len(key[2]))
        ),
        lambda: by_other_groups(sides, like_other_groups(job, key, number, sides)),
        lambda: by_routine(
            sides,
            ranks_off_routine(job, {rank: met[rank] for side in sides for rank in side}),
            been_here=lambda rank: job.views[rank].has_been_at(met[rank]),
        ),
    )


def _departure(job: JobIndex, mismatch: RecordMismatch, answer: Disagree) -> Departure:
    """Return whether the culprits skipped the collective of the others, or issued an extra one;
    empty if they differ.
    """
    culprits, met = mismatch.culprits, mismatch.ops
    if mismatch.tie or answer.aspect not in ("op", "shape", "dtype") or len(culprits) >= len(met):
        return ""
    usual = met[mismatch.others[0]]
    found = {
        departure_of(job, rank, met[rank], usual)
        for rank in culprits[:_RANKS_OF_A_SIDE]
        if rank in met
    }
    return found.pop() if len(found) == 1 else ""


def _out_of_step(
    job: JobIndex,
    key: ChannelKey,
    tracks: Mapping[int, Track],
    shifts: Sequence[Shift],
    first: Shift,
) -> RecordMismatch:
    """Make a mismatch of the ranks whose shift starts first, and whose arguments agree with those
    of the others there.
    """
    ops = _ops_at(tracks, first.number)
    tie = first.other is not None and ranks_off_routine(job, ops) != (first.rank,)
    culprits = tuple(
        sorted(ops if tie else (shift.rank for shift in shifts if shift.number == first.number))
    )
    return RecordMismatch(
        key,
        job.channels[key],
        first.number,
        ops,
        answer=None,
        culprits=culprits,
        blamed_by="undecided" if tie else "majority",
        shift=first,
        departure="" if tie else first.departure,
        silent=not any(track.open for track in tracks.values()),
    )


def _is_stuck_after(job: JobIndex, key: ChannelKey, number: int) -> bool:
    """Return whether a rank is stuck on this channel, from this number on."""
    views = [job.views[rank] for rank in job.users[key]]
    return any(
        any(open_number >= number for open_number in view.tracks[key].open)
        or any(block.op.channel.key == key for block in view.blocks.values())
        for view in views
    )


def _is_repeat(earlier: RecordMismatch, later: RecordMismatch) -> bool:
    """Return whether two mismatches are one finding: a wrong reduce op comes in every step."""
    if earlier.answer is None or later.answer is None or earlier.shift is not None:
        return False
    # On a tie, a rank leaves its routine only the first time: from then on, the wrong collective is
    # part of it.
    same_ranks = set(earlier.culprits) == set(later.culprits) or (
        later.tie and earlier.answer.parties == later.answer.parties
    )
    return (
        same_ranks
        and earlier.answer.aspect == later.answer.aspect
        and earlier.silent
        and later.silent
    )


# --- point to point


def _pair_mismatches(job: JobIndex) -> Iterator[RecordMismatch]:
    """Yield the first message of each pair of ranks whose send and receive disagree."""
    for sender, receiver, pairs in _met_messages(job):
        for send, recv in pairs:
            answer = compare_pair(sender.rank, send.args, receiver.rank, recv.args)
            if isinstance(answer, Disagree):
                yield _pair_mismatch(job, sender.rank, send, receiver.rank, recv, answer)
                break


def _pair_mismatch(
    job: JobIndex,
    sender: int,
    send: Collective,
    receiver: int,
    recv: Collective,
    answer: Disagree,
) -> RecordMismatch:
    key, ops = send.channel.key, {sender: send, receiver: recv}
    decision = by_routine([[sender], [receiver]], ranks_off_routine(job, ops)) or UNDECIDED
    blocks = [block for rank in ops for block in job.views[rank].blocks.values()]
    return RecordMismatch(
        key,
        job.channels[key],
        send.sequence_number,
        ops,
        answer,
        culprits=decision.culprits or tuple(sorted(ops)),
        blamed_by=decision.by,
        pair=(send, recv),
        silent=not any(block.op.index in (send.index, recv.index) for block in blocks),
    )


def pair_with_any_source(sender: RankView, receiver: RankView, key: ChannelKey) -> list[Pair]:
    """Pair the messages from one rank to another as :func:`pair_messages` does, with the receives
    from any source that took one of them.
    """
    sends = sender.pairs.get((key, receiver.rank, "send"), [])
    receives = receiver.pairs.get((key, sender.rank, "recv"), [])
    complete = not (sender.wrapped or receiver.wrapped)
    if not complete or not from_any(receiver, key) or not sources_known(receiver, key):
        return pair_messages(sends, receives, complete=complete)
    took = [op for op in from_any(receiver, key) if op.took_from == sender.rank]
    received = sorted((*receives, *took), key=lambda op: op.index)
    pairs: list[Pair] = []
    for tag in sorted({op.tag for op in (*sends, *received)}):
        pairs += zip_longest(
            [op for op in sends if op.tag == tag], [op for op in received if op.tag == tag]
        )
    return pairs


def pair_by_peer(sender: RankView, receiver: RankView, key: ChannelKey) -> list[Pair]:
    """Pair the messages from one rank to another; none if the other receives from any source, where
    the records need not show which message met which receive.
    """
    return [] if from_any(receiver, key) else pair_with_any_source(sender, receiver, key)


def _met_messages(
    job: JobIndex,
) -> Iterator[tuple[RankView, RankView, list[tuple[Collective, Collective]]]]:
    """Yield each sender and receiver with the messages of one channel that met, the oldest first.
    Of other tools' dumps, only those in flight on both ranks are known.
    """
    for _, view in sorted(job.views.items()):
        for (key, peer, direction), sends in sorted(view.pairs.items()):
            other = job.views.get(peer)
            if direction != "send" or other is None:
                continue
            pairs = (
                _in_flight_on_both(view, other, key, sends[0])
                if job.foreign
                else pair_by_peer(view, other, key)
            )
            yield view, other, [(send, recv) for send, recv in pairs if send and recv]


def _in_flight_on_both(
    view: RankView, other: RankView, key: ChannelKey, send: Collective
) -> list[Pair]:
    recv = find_counterpart(view, other, key, send)
    if recv is None or recv is send or is_queued(view, send) or is_queued(other, recv):
        return []
    return [(send, recv)]


def from_any(view: RankView, key: ChannelKey) -> list[Collective]:
    """Return a rank's receives from any source."""
    return view.pairs.get((key, -1, "recv"), [])


def sources_known(view: RankView, key: ChannelKey) -> bool:
    """Return whether the records tell whose message each receive from any source took."""
    return all(
        op.took_from is not None or op.in_flight or op.state is State.FAILED
        for op in from_any(view, key)
    )
