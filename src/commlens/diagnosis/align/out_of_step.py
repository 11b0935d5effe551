"""Find ranks that are out of step: a rank skipped a collective or issued one too many, and
everything after it pairs up wrongly. Find those, too, that once issued collectives of one shape in
another order (:class:`SwappedOrder`).

Say all issue one all_reduce at each of the lines 20 to 23, and rank 1 skips line 21 once::

    number     1   2   3   4   5   6
    others    20  21  22  23  20  21
    rank 1    20  22  23  20  21  22

Where the ops and the shapes agree, nothing hangs, and only the source lines and the optimizer steps
show it: from number 2 on, rank 1 is 1 collective ahead (:class:`Shift`), as its line 22 under
number 2 is that of the others under number 3. Lines may legally differ between ranks (``if rank ==
0: ... else: ...``), so each line of the rank is first translated into the line of the others that
it met before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from commlens.diagnosis.align.routine import leaves_routine
from commlens.diagnosis.align.tie_break import (
    UNDECIDED,
    by_majority,
    by_routine,
    is_majority,
)
from commlens.diagnosis.index.job_index import JobIndex, Track
from commlens.model.collective import ChannelKey, Collective

_FURTHEST = 256  # the longest shift that is found, in collectives
_RECENT = 512  # records of a rank in which its habit is looked for
# collectives before the first visible difference among which an extra one may have paired up
# unnoticed
_EARLIER = 16

Departure = Literal["", "skipped", "extra", "either"]
"""Whether a rank out of step skipped a collective or issued one too many; ``either`` if the records
allow both.
"""


class Shift(msgspec.Struct):
    """From ``number`` on, ``rank`` is ``by`` collectives ahead of the others; behind them if
    negative.
    """

    rank: int
    number: int
    by: int
    # issued by the others under that number; for a negative shift, the one too many
    skipped: Collective
    own: Collective  # issued by the rank under that number
    matches: int  # later collectives that agree with the shift
    departure: Departure
    unsure: bool = False  # of two ranks, the other may be the one out of step


def find_shifts(job: JobIndex, key: ChannelKey) -> list[Shift]:
    """Return the shifts of a channel, by rank."""
    tracks = job.tracks_on(key)
    if not job.foreign:
        return _shifts_among(job, tracks, Counter(tracks.keys()))
    from commlens.diagnosis.index.columns import representatives

    stands_for = representatives({rank: track.ops for rank, track in tracks.items()})
    votes = Counter({rank: len(ranks) for rank, ranks in stands_for.items()})
    found = _shifts_among(job, {rank: tracks[rank] for rank in stands_for}, votes)
    shifts = [
        msgspec.structs.replace(shift, rank=rank, own=own)
        for shift in found
        for rank in stands_for[shift.rank]
        if (own := tracks[rank].ops.get(shift.number)) and _kind(own) == _kind(shift.own)
    ]
    return sorted(shifts, key=lambda shift: shift.rank)


Votes = Counter[int]
"""By rank, the number of ranks that it stands for."""


def _shifts_among(job: JobIndex, tracks: Mapping[int, Track], votes: Votes) -> list[Shift]:
    numbers = sorted({number for track in tracks.values() for number in track.ops})
    suspects = _suspects(tracks, numbers, votes)
    if not suspects:
        return []
    if len(tracks) == 2:
        return _shift_of_two(job, tracks)
    # if most ranks differ somewhere, too few are left to show what is usual
    suspected = sum(votes[rank] for rank in suspects)
    trusted = votes.keys() if is_majority(suspected, votes.total()) else votes.keys() - suspects
    shifts = []
    for rank in sorted(suspects):
        others = {other: tracks[other] for other in trusted if other != rank}
        usual = _usual_ops(others, numbers, votes)
        shift = _find_shift(rank, tracks[rank], usual, cut=job.views[rank].lost_newest)
        if shift is not None and is_majority(
            _agree(tracks, shift.number, usual[shift.number], votes), votes.total()
        ):
            shifts.append(shift)
    # Half of the ranks or more cannot be out of step with the majority.
    in_step = votes.total() - sum(votes[shift.rank] for shift in shifts)
    return shifts if is_majority(in_step, votes.total()) else []


def line_of(op: Collective) -> Hashable:
    """Return the source lines that issued an op, to compare; None if they are unknown."""
    return op.call_lines or None


def departure_of(job: JobIndex, rank: int, own: Collective, expected: Collective) -> Departure:
    """Return whether a rank that issued ``own`` instead of ``expected`` skipped ``expected`` or
    issued an extra op; empty if unknown.

    Unlike a shift, this can be seen while the others still wait in ``expected``, and their next
    collective is unknown.
    """
    ahead = steps_ahead(job, rank, own, expected)
    if ahead:
        return "skipped" if ahead > 0 else "extra"
    history = [op for op in job.views[rank].history if op.index < own.index][-_RECENT:]
    same = [i for i, op in enumerate(history) if _habit_token(op) == _habit_token(own)]
    if not same:  # perhaps the line of a helper, called from another place
        return "either" if any((op.op, op.source) == (own.op, own.source) for op in history) else ""
    # How many like ``expected`` came between the last two like ``own``, and since the last one? If
    # the rank used to issue ``e o e o`` and now issues ``o`` after ``o``: 1, and 0.
    wanted = (expected.op, expected.channel.key)
    previous, latest = [-1, *same][-2:]
    is_wanted = [(op.op, op.channel.key) == wanted for op in history]
    between, since = sum(is_wanted[previous + 1 : latest]), sum(is_wanted[latest + 1 :])
    if since >= between:
        return ""
    # ``own`` is an extra op if it came before its time, in optimizer steps
    last = history[latest].step
    usual = last - history[previous].step if previous >= 0 else 0
    in_time = 0 < usual <= own.step - last
    return "skipped" if between == 1 or in_time else "either"


def steps_ahead(job: JobIndex, rank: int, own: Collective, other: Collective) -> int:
    """Return the optimizer steps that a rank has done more than the others since they last met;
    negative: fewer.
    """
    tracks = job.tracks_on(own.channel.key)
    last = own.sequence_number - 1
    met = [track.ops[last] for one, track in tracks.items() if one != rank and last in track.ops]
    if rank not in tracks or last not in tracks[rank].ops or len({op.step for op in met}) != 1:
        return 0
    return (own.step - other.step) - (tracks[rank].ops[last].step - met[0].step)


def _habit_token(op: Collective) -> Hashable:
    return (op.op, op.channel.key, line_of(op))


# --- which ranks to check, and against which collectives


def _suspects(tracks: Mapping[int, Track], numbers: Sequence[int], votes: Votes) -> set[int]:
    """Return the ranks whose step, op, size or line differs from that of most others at some
    number.
    """
    suspects: set[int] = set()
    # A rank's records share their arguments and stacks, so most of the work is done once for each
    # of these.
    requests: dict[tuple[int, int], Hashable] = {}

    def token_of(op: Collective) -> Hashable:
        shared = (id(op.args), id(op.stack))
        if shared not in requests:
            requests[shared] = _request(op)
        return (requests[shared], op.step)

    for number in numbers:
        tokens = {
            rank: token_of(track.ops[number])
            for rank, track in tracks.items()
            if number in track.ops
        }
        if len(set(tokens.values())) > 1:
            (usual, most), (_, second) = _count(tokens, votes).most_common(2)
            suspects.update(
                rank for rank, value in tokens.items() if most == second or value != usual
            )
    return suspects


def _sizes(op: Collective) -> tuple[int, ...]:
    return tuple(spec.numel for spec in op.args.inputs)


def _request(op: Collective) -> Hashable:
    return (op.op, _sizes(op), line_of(op))


def _kind(op: Collective) -> Hashable:
    """Return the properties that are equal on ranks that issue the same op."""
    return (_request(op), op.step)


def _count(of_ranks: Mapping[int, Hashable], votes: Votes) -> Counter[Hashable]:
    """Count the ranks of each value."""
    found: Counter[Hashable] = Counter()
    for rank, value in of_ranks.items():
        found[value] += votes[rank]
    return found


def _agree(tracks: Mapping[int, Track], number: int, usual: Collective, votes: Votes) -> int:
    """Count the ranks that issued an op like this one under a number."""
    kind = _kind(usual)
    return sum(
        votes[rank]
        for rank, track in tracks.items()
        if number in track.ops and _kind(track.ops[number]) == kind
    )


def _usual_ops(
    tracks: Mapping[int, Track], numbers: Sequence[int], votes: Votes
) -> dict[int, Collective]:
    """Return for each number the op that most of these ranks issued."""
    usual: dict[int, Collective] = {}
    for number in numbers:
        met = {
            rank: _kind(op)
            for rank, track in sorted(tracks.items())
            if (op := track.ops.get(number))
        }
        if met:
            [(most, _)] = _count(met, votes).most_common(1)
            usual[number] = next(tracks[rank].ops[number] for rank in met if met[rank] == most)
    return usual


# --- by how many collectives a rank is shifted

_MATCHES = 2  # later collectives that must fit a shift: a single one may do so by chance
_MATCHES_OF_LINES = 3  # where only lines differ: a line may legally meet several of the others'
_PLACES = 2  # lines or steps that these must be from


class _Matcher:
    """Compares a rank's collectives with those of the others, and learns which of their lines each
    line of the rank meets: if rank 0 issues from line 30 what the others issue from line 35, line
    30 meets line 35.
    """

    def __init__(self, *, compare_steps: bool) -> None:
        self._compare_steps = compare_steps
        self._lines: dict[Hashable, Hashable] = {}

    def same_args(self, mine: Collective, theirs: Collective) -> bool:
        """Return whether op, step and sizes are equal."""
        return (
            mine.op == theirs.op
            and (mine.step == theirs.step or not self._compare_steps)
            and _sizes(mine) == _sizes(theirs)
        )

    def learn(self, mine: Collective, theirs: Collective) -> bool:
        """Return whether the collectives fit, and if so, remember that their lines met."""
        line, other = line_of(mine), line_of(theirs)
        if not self.same_args(mine, theirs) or self._lines.get(line) not in (None, other):
            return False
        self._lines[line] = other
        return True

    def fits(self, mine: Collective, theirs: Collective) -> bool:
        """Return whether the collectives are equal, up to lines that met before or that are new."""
        line, other = line_of(mine), line_of(theirs)
        return self.same_args(mine, theirs) and (
            line == other or self._lines.get(line) in (None, other)
        )


def _find_shift(
    rank: int, track: Track, usual: Mapping[int, Collective], *, cut: bool
) -> Shift | None:
    """Return the smallest shift after which the rank's collectives fit those of the others; None if
    there is none.

    ``cut``: the rank issued more than its records show.
    """
    numbers = sorted(set(track.ops) & set(usual))
    if not numbers:
        return None
    # Steps that differ from the first record on are not comparable: a rank counts none, or starts
    # elsewhere.
    matcher = _Matcher(compare_steps=track.ops[numbers[0]].step == usual[numbers[0]].step)
    start = next(
        (number for number in numbers if not matcher.learn(track.ops[number], usual[number])), None
    )
    if start is None:
        return None
    furthest = min(_FURTHEST, max(max(track.ops), max(usual)) - start + 1)
    for distance in range(1, furthest + 1):
        by_distance = (
            _shift_by(by, rank, track, usual, start, matcher, cut=cut)
            for by in (distance, -distance)
        )
        found = [shift for shift in by_distance if shift is not None]
        if found:
            return (
                found[0] if len(found) == 1 else _likelier_shift(found[0], found[1], track, usual)
            )
    return None


def _shift_by(
    by: int,
    rank: int,
    track: Track,
    usual: Mapping[int, Collective],
    start: int,
    matcher: _Matcher,
    *,
    cut: bool,
) -> Shift | None:
    """Return the shift by so many collectives, if enough of those that follow fit then: 2 of them;
    3 from 2 places where only lines differ; or the only one that can, if it is the last one.

    Args:
        by: positive if the rank skipped collectives, negative if it issued extra ones.
        rank: that may be out of step.
        track: of the rank.
        usual: the collectives of the others, by number.
        start: the first number under which the rank and the others differ.
        matcher: has learned the lines that met before.
        cut: whether the rank issued more than its records show.
    """
    first = start if by > 0 else _first_extra(track, usual, start, by)
    matches, places = _count_matches(track, usual, first, by, matcher)
    if first == start and matcher.same_args(track.ops[start], usual[start]):
        enough = matches >= _MATCHES_OF_LINES and places >= _PLACES
    else:
        is_last = min(max(track.ops), max(usual) - by) <= first + 1
        differs = line_of(track.ops[start]) != line_of(usual[start])
        one_decides = abs(by) == 1 and is_last and differs and not cut
        enough = matches >= (1 if one_decides else _MATCHES)
    if not enough:
        return None
    own = track.ops[first]
    if by > 0:
        return Shift(rank, first, by, usual[first], own, matches, "skipped")
    return Shift(rank, first, by, own, own, matches, "extra")


def _first_extra(track: Track, usual: Mapping[int, Collective], start: int, by: int) -> int:
    """Return the number of the first extra collective, which may have paired up unnoticed before
    the first visible difference, at ``start``.

    Say the rank issues an extra one from line 30, which is new, so its line may legally differ::

        number   1   2   3   4
        others  20  21  22  23
        rank    20  30  21  22

    With ``by`` -1 and ``start`` 3, where line 21, which met line 21 before, meets 22, it is number
    2: there the lines differ, and the rank's line under number 3 is that of the others under 2.
    """
    for number in range(start - 1, max(min(track.ops), start - _EARLIER) - 1, -1):
        own, other, later = track.ops.get(number), usual.get(number), track.ops.get(number - by)
        if own is None or other is None or later is None or line_of(later) != line_of(other):
            return start
        if line_of(own) != line_of(other):
            return number
    return start


def _likelier_shift(
    skipped: Shift, extra: Shift, track: Track, usual: Mapping[int, Collective]
) -> Shift:
    """Return, of two shifts that both fit, the one after which more lines are equal."""

    def differ(shift: Shift) -> int:
        met = _met_after(track, usual, shift.number, shift.by)
        return sum(line_of(mine) != line_of(theirs) for mine, theirs in met)

    by_skipped, by_extra = differ(skipped), differ(extra)
    if by_skipped == by_extra:
        skipped.departure = "either"
    return extra if by_extra < by_skipped else skipped


def _count_matches(
    track: Track, usual: Mapping[int, Collective], start: int, by: int, matcher: _Matcher
) -> tuple[int, int]:
    """Return how many collectives from ``start`` on fit if shifted by ``by``, and from how many
    lines and steps; 0, 0 if one does not.
    """
    matching: list[Collective] = []
    for mine, theirs in _met_after(track, usual, start, by):
        if not matcher.fits(mine, theirs):
            return 0, 0
        matching.append(mine)
    return len(matching), len({(line_of(op), op.step) for op in matching})


def _met_after(
    track: Track, usual: Mapping[int, Collective], start: int, by: int
) -> Iterator[tuple[Collective, Collective]]:
    """Yield the rank's collectives from ``start`` on that come in a shift by ``by``, with those of
    the others that they then meet.
    """
    first = start - min(by, 0)
    for number, mine in track.ops.items():
        if number >= first and (theirs := usual.get(number + by)) is not None:
            yield mine, theirs


def _shift_of_two(job: JobIndex, tracks: Mapping[int, Track]) -> list[Shift]:
    """Return the shift of the rank that leaves its routine: of two ranks, each seems out of step to
    the other.
    """
    first, second = sorted(tracks)
    pairs = ((first, second), (second, first))
    cut = any(job.views[rank].lost_newest for rank in tracks)
    shifts = [
        shift
        for rank, other in pairs
        if (shift := _find_shift(rank, tracks[rank], tracks[other].ops, cut=cut)) is not None
    ]
    left = [shift.rank for shift in shifts if leaves_routine(job.views[shift.rank], shift.own)]
    changed_pace = [shift.rank for shift in shifts if _changes_pace(tracks[shift.rank], shift.own)]
    sides = [[first], [second]]
    culprits, _ = by_routine(sides, left) or by_routine(sides, changed_pace) or UNDECIDED
    if culprits:
        return [shift for shift in shifts if shift.rank in culprits]
    # both say the same, each seen from one rank: return the one that skipped a collective
    return [msgspec.structs.replace(shift, unsure=True) for shift in shifts if shift.by > 0][:1]


def _changes_pace(track: Track, op: Collective) -> bool:
    """Return whether a rank did another number of optimizer steps before this op than before any of
    its earlier ones.
    """
    steps = [
        track.ops[number].step for number in sorted(track.ops) if number <= op.sequence_number
    ][-_RECENT:]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    return len(gaps) > 2 and gaps[-1] not in gaps[:-1]


# --- swapped orders

_LONGEST = 16  # collectives in a row that can be in another order
_MET_BEFORE = 4  # times that two lines must have met


class SwappedOrder(msgspec.Struct):
    """From ``number`` on, ``rank`` issued the collectives of the others in another order: from line
    22 and then 21 what the others issued from line 21 and then 22.
    """

    rank: int
    number: int
    own: list[Collective]
    others: list[Collective]


def find_swapped_orders(job: JobIndex, key: ChannelKey) -> list[SwappedOrder]:
    """Return the swapped orders of a channel, by rank."""
    tracks = job.tracks_on(key)
    if len(tracks) < 2:
        return []
    # Compare all ranks with the first. If most differ from it in the same place, the first rank is
    # the odd one.
    base, *others = sorted(tracks)
    # the branch that swaps them may issue them from other lines, through the same functions
    for line in (line_of, lambda op: op.call_lines[:1] or None):
        swaps = [
            swap
            for rank in others
            if (swap := _compare(rank, tracks[rank], tracks[base].ops, line)) is not None
        ]
        if swaps:
            break
    else:
        return []
    return _odd_of_two(job, base, swaps[0]) if len(tracks) == 2 else _odd_swaps(base, tracks, swaps)


def _odd_of_two(job: JobIndex, base: int, swap: SwappedOrder) -> list[SwappedOrder]:
    """Return the swapped order of the one of two ranks that leaves its routine; none if both do, or
    none does.
    """
    both = (swap, _from_the_other_side(base, swap))
    left = [one.rank for one in both if leaves_routine(job.views[one.rank], one.own[0])]
    culprits, _ = by_routine([[one.rank] for one in both], left) or UNDECIDED
    return [one for one in both if one.rank in culprits]


def _odd_swaps(
    base: int, ranks: Iterable[int], swaps: Sequence[SwappedOrder]
) -> list[SwappedOrder]:
    """Return the swapped orders of the minority, which may be ``base`` alone."""
    swapped = [swap.rank for swap in swaps]
    alike = [rank for rank in ranks if rank not in swapped]
    culprits, _ = by_majority([alike, swapped]) or UNDECIDED
    if culprits == (base,) and len({swap.number for swap in swaps}) == 1:
        return [_from_the_other_side(base, swaps[0])]
    return [swap for swap in swaps if swap.rank in culprits]


def _from_the_other_side(base: int, swap: SwappedOrder) -> SwappedOrder:
    return SwappedOrder(base, swap.number, swap.others, swap.own)


def _compare(
    rank: int,
    track: Track,
    reference: Mapping[int, Collective],
    lines_of: Callable[[Collective], Hashable],
) -> SwappedOrder | None:
    """Return the one stretch of collectives whose lines meet the reference's lines in another
    order; None if there is not exactly one. ``lines_of`` returns the lines to compare.
    """
    numbers = sorted(set(track.ops) & set(reference))
    met = Counter((lines_of(track.ops[number]), lines_of(reference[number])) for number in numbers)
    usual = _usual_lines(met)
    if len(set(usual.values())) < len(usual):
        return None  # a line of the reference meets several of the rank
    odd = [
        number
        for number in numbers
        if usual[lines_of(track.ops[number])] != lines_of(reference[number])
    ]
    if not 2 <= len(odd) <= _LONGEST or odd[-1] - odd[0] != len(odd) - 1:
        return None  # not in a row: a line of the rank meets several of the reference
    own, others = [track.ops[number] for number in odd], [reference[number] for number in odd]
    if Counter(usual[lines_of(op)] for op in own) != Counter(map(lines_of, others)):
        return None
    if not all(map(_same_args, own, others)):
        return None  # a disagreement, or a shift
    if any(met[(lines_of(op), usual[lines_of(op)])] < _MET_BEFORE or op.concurrent for op in own):
        return None
    return SwappedOrder(rank, odd[0], own, others)


def _usual_lines(met: Counter[tuple[Hashable, Hashable]]) -> dict[Hashable, Hashable]:
    """Return, by line of a rank, the line of the reference that it meets most often."""
    usual: dict[Hashable, Hashable] = {}
    for (mine, theirs), _ in met.most_common():
        usual.setdefault(mine, theirs)
    return usual


def _same_args(mine: Collective, theirs: Collective) -> bool:
    return (mine.op, mine.step, mine.args.inputs) == (theirs.op, theirs.step, theirs.args.inputs)
