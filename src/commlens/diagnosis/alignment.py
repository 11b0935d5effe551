"""Ranks that met, but not for the same thing: the one pass over all records, and the mismatches that it finds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from commlens.diagnosis.index import Track, World, find_counterpart, is_queued
from commlens.diagnosis.out_of_step import Shift, find_shifts, skips_by_habit
from commlens.diagnosis.routine import exact_tokens, expected_token, loose_token, token
from commlens.matching.answer import Answer, Disagree, Severity
from commlens.matching.collectives import compare_coalesced, compare_collectives
from commlens.matching.error_texts import is_refusal
from commlens.matching.point_to_point import compare_pair, pair_messages
from commlens.model.collective import Channel, ChannelKey, Collective, CollectiveArgs, State
from commlens.model.ops import UNEVEN


@dataclass
class Mismatch:
    """A disagreement at one number of a channel, or a rank out of step from there on."""

    key: ChannelKey
    channel: Channel
    number: int
    ops: dict[int, Collective]  # who met
    answer: Disagree | None  # None: out of step, and nothing on the wire tells
    culprits: tuple[int, ...]
    tie: bool
    by_history: bool = False  # the culprits were told by their own history, not by a majority
    shift: Shift | None = None
    habit: bool = False  # the culprit usually issues this right after what the others wait in
    again: int = 0  # how many later ones are the same
    silent: bool = False  # it hung nobody
    uncertain: bool = False  # issued by several threads at once: their order is not sure
    pair: tuple[Collective, Collective] | None = None  # a send and the receive that it met
    refused: bool = False  # strict verification raised on those who met, and nothing was sent
    sides: dict[int, str] = field(default_factory=dict)

    @property
    def absorbs(self) -> bool:
        """Whether what goes wrong later on the channel may follow from it."""
        return self.refused or self.shift is not None or (self.answer is not None and self.answer.severity is Severity.ILLEGAL)

    def explains(self, world: World, number: int, absent: Sequence[int]) -> bool:
        """Whether a rank that is stuck in this channel's ``number`` is stuck because of this."""
        if not self.absorbs or number < self.number:
            return False
        if self.shift is not None or not absent or set(absent) <= set(self.culprits):
            return True
        return any(op.state is not State.COMPLETED for op in self.ops.values())


def align_records(world: World) -> list[Mismatch]:
    """All channels, in an order that does not depend on that of the logs."""
    mismatches: list[Mismatch] = []
    for key in sorted(world.users):
        mismatches += _channel(world, key)
    mismatches += _open_pairs(world) if world.foreign else _pairs(world)
    for mismatch in mismatches:
        mismatch.refused = any(op.state is State.FAILED and is_refusal(op.error) for op in mismatch.ops.values())
    return [mismatch for mismatch in mismatches if not (mismatch.refused and _went_on(world, mismatch))]


def _went_on(world: World, mismatch: Mismatch) -> bool:
    """Whether the program caught the refusal on every rank and did more: then it is over, and did no harm."""
    for rank, op in mismatch.ops.items():
        view = world.views[rank]
        if view.exit.kind == "clean":
            continue
        last = view.last_op
        if view.exit.failed or (last is not None and last.index == op.index):
            return False
    return True


# --- collectives -------------------------------------------------------------------------------------------------


def _channel(world: World, key: ChannelKey) -> list[Mismatch]:
    users = world.users[key]
    if len(users) < 2:
        return []
    tracks = {rank: world.views[rank].tracks[key] for rank in users}
    group_ranks = key[2]
    shifts = find_shifts(world, key)
    shift = min(shifts, key=lambda s: (s.number, s.rank), default=None)
    mismatches: list[Mismatch] = []
    known: dict[tuple[tuple[int, int], ...], Answer] = {}
    ids: dict[int, int] = {}
    asks: dict[CollectiveArgs, int] = {}
    kept: list[CollectiveArgs] = []  # so that an id stays that of one object
    numbers = _numbers(world, tracks)
    for number in numbers:
        if shift is not None and number > shift.number and not _is_at(shifts, number):
            break
        met = {rank: track.ops[number] for rank, track in tracks.items() if number in track.ops}
        if len(met) < 2:
            continue
        signature = []
        coalesced = False
        for rank, op in met.items():
            ident = ids.get(id(op.args))
            if ident is None:
                ident = ids[id(op.args)] = asks.setdefault(op.args, len(asks))
                kept.append(op.args)
            signature.append((rank, ident))
            coalesced = coalesced or bool(op.coalescing_id)
        if coalesced:
            answer = compare_coalesced({rank: tracks[rank].args_of(number) for rank in met}, group_ranks)
        elif len({ident for _, ident in signature}) == 1 and next(iter(met.values())).op != "all_to_all":
            continue
        else:
            code = tuple(signature)
            found = known.get(code)
            if found is None:
                asked = {rank: _comparable(op.args) if world.foreign else op.args for rank, op in met.items()}
                found = known[code] = compare_collectives(asked, group_ranks)
            answer = found
        if not isinstance(answer, Disagree):
            continue
        mismatch = _mismatch(world, key, number, met, answer, shifts)
        if not _same_again(mismatches, mismatch):
            mismatches.append(mismatch)
        if mismatch.absorbs and not mismatch.silent:
            break
    if shift is not None and not any(t.shift is shift for t in mismatches):
        earlier = [t for t in mismatches if t.number < shift.number]
        met = {rank: track.ops[shift.number] for rank, track in tracks.items() if shift.number in track.ops}
        culprits = tuple(sorted(s.rank for s in shifts if s.number == shift.number))
        mismatch = Mismatch(key, world.channels[key], shift.number, met, None, culprits, False, shift=shift)
        mismatch.silent = not any(track.open for track in tracks.values())
        mismatches = [*earlier, mismatch]
    return mismatches


def _comparable(asked: CollectiveArgs) -> CollectiveArgs:
    """Other recorders do not tell the splits, without which the sizes of these may differ by right."""
    return msgspec.structs.replace(asked, inputs=(), outputs=()) if asked.op in UNEVEN else asked


def _numbers(world: World, tracks: Mapping[int, Track]) -> list[int]:
    """Numbers that are worth a comparison."""
    if world.foreign:
        from commlens.diagnosis.window import differing

        return differing(tracks)
    return sorted({number for track in tracks.values() for number in track.ops})


def _is_at(shifts: Sequence[Shift], number: int) -> bool:
    return any(shift.number == number for shift in shifts)


def _mismatch(
    world: World, key: ChannelKey, number: int, met: Mapping[int, Collective], answer: Disagree, shifts: Sequence[Shift]
) -> Mismatch:
    here = [shift for shift in shifts if shift.number == number]
    culprits, tie, by_history = answer.minority, answer.tie, False
    if here and {s.rank for s in here} <= set(met):
        culprits, tie = tuple(sorted(s.rank for s in here)), False
    elif tie:
        sides = {rank: met[rank] for party in answer.parties for rank in party.ranks if rank in met}  # of others the aspect is not known
        odd = leave_routine(world, sides)
        if odd:
            culprits, tie, by_history = odd, False, True
        else:
            culprits = tuple(sorted(sides))
    mismatch = Mismatch(key, world.channels[key], number, dict(met), answer, culprits, tie, by_history)
    mismatch.shift = here[0] if here else None
    mismatch.uncertain = any(op.concurrent for op in met.values())
    mismatch.silent = all(op.state is State.COMPLETED for op in met.values()) and not _stuck_after(world, key, number)
    if not tie and mismatch.shift is None and answer.aspect in ("op", "shape", "dtype") and len(culprits) < len(met):
        usual = next(op for rank, op in sorted(met.items()) if rank not in culprits)
        mismatch.habit = all(skips_by_habit(world, rank, met[rank], usual) for rank in culprits if rank in met)
    return mismatch


def _stuck_after(world: World, key: ChannelKey, number: int) -> bool:
    """Whether anybody is held up on this channel from this number on."""
    for rank in world.users[key]:
        view = world.views[rank]
        if any(n >= number for n in view.tracks[key].open):
            return True
        if any(block.op.channel.key == key for block in view.blocks.values()):
            return True
    return False


def leave_routine(world: World, ops: Mapping[int, Collective]) -> tuple[int, ...]:
    """Which of the ranks do here what they never did before in this place. Empty where all or none do.

    Looked at are the op and what the rank issued between it and the one before it on the same channel: who skips a collective
    may first meet the others in a later one. Then, since a skipped collective's successor may pair up unnoticed, what it issued
    shortly before.
    """
    return _leave_routine(world, ops, False) or _leave_routine(world, ops, True)


def _leave_routine(world: World, ops: Mapping[int, Collective], before: bool) -> tuple[int, ...]:
    for read in (_tokens, exact_tokens, _loose_tokens):
        odd = []
        for rank, op in sorted(ops.items()):
            history = world.views[rank].history
            position = _position(history, op)
            if position is None:
                continue
            start = max(0, position - 2048)
            key = op.channel.key
            since = start if before else next((i for i in range(position - 1, start, -1) if history[i].channel.key == key), start)
            tokens = read(history[start : position + 1])
            if any(expected_token(tokens, i - start) is False for i in range(max(since + 1, position - 16), position + 1)):
                odd.append(rank)
        if odd and len(odd) < len(ops):
            return tuple(odd)
    return ()


def _tokens(ops: Sequence[Collective]) -> list[Hashable]:
    return [token(op) for op in ops]


def _loose_tokens(ops: Sequence[Collective]) -> list[Hashable]:
    return [loose_token(op) for op in ops]


def _position(history: Sequence[Collective], op: Collective) -> int | None:
    """Where an op is in a rank's log, which is ordered by index."""
    low, high = 0, len(history)
    while low < high:
        middle = (low + high) // 2
        if history[middle].index < op.index:
            low = middle + 1
        else:
            high = middle
    return low if low < len(history) and history[low].index == op.index else None


def _same_again(mismatches: list[Mismatch], mismatch: Mismatch) -> bool:
    """Whether an earlier one says the same: a wrong reduce op in every step is one finding."""
    for earlier in mismatches:
        if earlier.answer is not None and mismatch.answer is not None and earlier.shift is None:
            # Between two sides as large, history tells only the first time: from then on the odd one repeats itself.
            same = set(earlier.culprits) == set(mismatch.culprits) or (mismatch.tie and earlier.answer.parties == mismatch.answer.parties)
            if (
                same
                and earlier.answer.aspect == mismatch.answer.aspect
                and earlier.silent
                and mismatch.silent
                and earlier.key == mismatch.key
            ):
                earlier.again += 1
                return True
    return False


# --- point to point ----------------------------------------------------------------------------------------------


def _pairs(world: World) -> list[Mismatch]:
    """Sends and receives that met and do not carry the same."""
    mismatches: list[Mismatch] = []
    for rank in sorted(world.views):
        view = world.views[rank]
        for (key, peer, direction), sends in sorted(view.pairs.items(), key=lambda item: (item[0][0], item[0][1], item[0][2])):
            if direction != "send" or peer not in world.views:
                continue
            if (key, -1, "recv") in world.views[peer].pairs:
                continue  # it received from whoever sent first: nobody knows which message met which receive
            first = True
            other = world.views[peer]
            complete = not (view.wrapped or other.wrapped)
            for send, recv in pair_messages(sends, other.pairs.get((key, rank, "recv"), []), complete=complete):
                if send is None or recv is None or send.args == recv.args:
                    continue
                answer = compare_pair(rank, send.args, peer, recv.args)
                if isinstance(answer, Disagree) and first:
                    mismatches.append(_pair_mismatch(world, key, rank, peer, send, recv, answer))
                    first = False
    return mismatches


def _open_pairs(world: World) -> list[Mismatch]:
    """The same of other tools' dumps: a message that does not fit stays in flight on both sides."""
    mismatches: list[Mismatch] = []
    for rank in sorted(world.views):
        view = world.views[rank]
        for (key, peer, direction), sends in sorted(view.pairs.items(), key=lambda item: item[1][0].index):
            other = world.views.get(peer)
            if direction != "send" or other is None:
                continue
            send = sends[0]
            recv = find_counterpart(view, other, key, send)
            if recv is None or recv is send or is_queued(view, send) or is_queued(other, recv):
                continue
            answer = compare_pair(rank, send.args, peer, recv.args)
            if isinstance(answer, Disagree):
                mismatches.append(_pair_mismatch(world, key, rank, peer, send, recv, answer))
    return mismatches


def _pair_mismatch(
    world: World, key: ChannelKey, sender: int, receiver: int, send: Collective, recv: Collective, answer: Disagree
) -> Mismatch:
    odd = leave_routine(world, {sender: send, receiver: recv})
    mismatch = Mismatch(
        key, world.channels[key], send.sequence_number, {sender: send, receiver: recv}, answer,
        odd or tuple(sorted((sender, receiver))), not odd, bool(odd), pair=(send, recv),
    )  # fmt: skip
    blocked = any(b.op.index in (send.index, recv.index) for r in (sender, receiver) for b in world.views[r].blocks.values())
    mismatch.silent = not blocked
    return mismatch
