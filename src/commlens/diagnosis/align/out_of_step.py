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
it met before. Of two ranks, nothing but their routines tells which one is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
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
from commlens.diagnosis.index.job_index import JobIndex, RankView, Track
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
    other: int | None = None
    """Of two ranks, the other one, if it may be the one out of step."""


Votes = Counter[int]
"""By rank, the number of ranks that it stands for."""


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


def _shifts_among(job: JobIndex, tracks: Mapping[int, Track], votes: Votes) -> list[Shift]:
    voters = _Voters(tracks, votes)
    suspects = voters.suspects()
    if not suspects:
        return []
    if votes.total() == 2:
        return _shift_of_two(job, tracks)
    # if most ranks differ somewhere, too few are left to show what is usual
    suspected = sum(votes[rank] for rank in suspects)
    trusted = votes.keys() if is_majority(suspected, votes.total()) else votes.keys() - suspects
    shifts = []
    for rank in sorted(suspects):
        usual = voters.usual_ops(trusted - {rank})
        shift = _ShiftSearch(rank, tracks[rank].ops, usual, job.views[rank].lost_newest).find()
        if shift is not None:
            agree = voters.count(voters.kinds_at(shift.number))[_kind(usual[shift.number])]
            shifts += [shift] if is_majority(agree, votes.total()) else []
    # Half of the ranks or more cannot be out of step with the majority.
    in_step = votes.total() - sum(votes[shift.rank] for shift in shifts)
    return shifts if is_majority(in_step, votes.total()) else []


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
    like_own = [i for i, op in enumerate(history) if _habit_token(op) == _habit_token(own)]
    if not like_own:  # perhaps the line of a helper, called from another place
        return "either" if any((op.op, op.source) == (own.op, own.source) for op in history) else ""
    # If the rank used to issue ``e o e o`` and now issues ``o`` after ``o``, one like ``expected``
    # came in its last round, and none in this one.
    previous, latest = [-1, *like_own][-2:]
    wanted = (expected.op, expected.channel.key)
    is_wanted = [(op.op, op.channel.key) == wanted for op in history]
    in_last_round, in_this_round = (
        sum(is_wanted[previous + 1 : latest]),
        sum(is_wanted[latest + 1 :]),
    )
    if in_this_round >= in_last_round:
        return ""
    # ``own`` may be an extra op, unless as many optimizer steps as in the last round have passed
    steps_of_round = history[latest].step - history[previous].step if previous >= 0 else 0
    is_due = 0 < steps_of_round <= own.step - history[latest].step
    return "skipped" if in_last_round == 1 or is_due else "either"


def steps_ahead(job: JobIndex, rank: int, own: Collective, other: Collective) -> int:
    """Return the optimizer steps that a rank has done more than the others since they last met;
    negative: fewer.
    """
    key, last = own.channel.key, own.sequence_number - 1
    met = {each: job.views[each].op_at(key, last) for each in {*job.users.get(key, ()), rank}}
    mine = met.pop(rank)
    steps = {op.step for op in met.values() if op is not None}
    if mine is None or len(steps) != 1:
        return 0
    return (own.step - other.step) - (mine.step - steps.pop())


def _habit_token(op: Collective) -> Hashable:
    return (op.op, op.channel.key, _line_of(op))


# --- which ranks to check, and against which collectives


def _sizes(op: Collective) -> tuple[int, ...]:
    return tuple(spec.numel for spec in op.args.inputs)


def _line_of(op: Collective) -> Hashable:
    """Return the source lines that issued an op, to compare; None if they are unknown."""
    return op.call_lines or None


def _request(op: Collective) -> Hashable:
    return (op.op, _sizes(op), _line_of(op))


def _kind(op: Collective) -> Hashable:
    """Return the properties that are equal on ranks that issue the same op."""
    return (_request(op), op.step)


class _Voters:
    """The ranks of a channel that are compared; ``votes``: how many ranks each stands for."""

    def __init__(self, tracks: Mapping[int, Track], votes: Votes) -> None:
        self._tracks, self._votes = dict(sorted(tracks.items())), votes
        self._numbers = sorted({number for track in tracks.values() for number in track.ops})
        # by ids: a rank's records share their arguments and stacks
        self._requests: dict[tuple[int, int], Hashable] = {}

    def kinds_at(self, number: int) -> dict[int, Hashable]:
        """Return the kind of op that each rank issued under a number."""
        kinds: dict[int, Hashable] = {}
        for rank, track in self._tracks.items():
            if op := track.ops.get(number):
                shared = (id(op.args), id(op.stack))
                if shared not in self._requests:
                    self._requests[shared] = _request(op)
                kinds[rank] = (self._requests[shared], op.step)
        return kinds

    def count(self, kinds: Mapping[int, Hashable]) -> Counter[Hashable]:
        """Count the ranks of each kind."""
        found: Counter[Hashable] = Counter()
        for rank, kind in kinds.items():
            found[kind] += self._votes[rank]
        return found

    def suspects(self) -> set[int]:
        """Return the ranks whose step, op, size or line differs from that of most others at some
        number.
        """
        suspects: set[int] = set()
        for number in self._numbers:
            kinds = self.kinds_at(number)
            if len(set(kinds.values())) > 1:
                (usual, most), (_, second) = self.count(kinds).most_common(2)
                suspects.update(
                    rank for rank, kind in kinds.items() if most == second or kind != usual
                )
        return suspects

    def usual_ops(self, ranks: Collection[int]) -> dict[int, Collective]:
        """Return for each number the op that most of these ranks issued."""
        usual: dict[int, Collective] = {}
        for number in self._numbers:
            kinds = {rank: kind for rank, kind in self.kinds_at(number).items() if rank in ranks}
            if kinds:
                [(most, _)] = self.count(kinds).most_common(1)
                rank = next(rank for rank, kind in kinds.items() if kind == most)
                usual[number] = self._tracks[rank].ops[number]
        return usual


# --- by how many collectives a rank is shifted

_MATCHES = 2  # later collectives that must fit a shift: a single one may do so by chance
_MATCHES_OF_LINES = 3  # where only lines differ: a line may legally meet several of the others'
_PLACES = 2  # lines or steps that these must be from


class _ShiftSearch:
    """Compares a rank's collectives with those of the others, and learns which of their lines each
    line of the rank meets: if rank 0 issues from line 30 what the others issue from line 35, line
    30 meets line 35.

    Args:
        rank: the one that may be out of step.
        ops: its collectives, by number.
        usual: the collectives of the others, by number.
        cut: whether the rank issued more than its records show.
    """

    def __init__(
        self, rank: int, ops: Mapping[int, Collective], usual: Mapping[int, Collective], cut: bool
    ) -> None:
        self._rank, self._ops, self._usual, self._cut = rank, ops, usual, cut
        self._compare_steps = True
        self._lines: dict[Hashable, Hashable] = {}

    def find(self) -> Shift | None:
        """Return the smallest shift after which the rank's collectives fit those of the others;
        None if there is none.
        """
        numbers = sorted(set(self._ops) & set(self._usual))
        # Steps that differ from the first record on are not comparable: a rank counts none, or
        # starts elsewhere.
        self._compare_steps = not numbers or (
            self._ops[numbers[0]].step == self._usual[numbers[0]].step
        )
        start = next((number for number in numbers if not self._learn(number)), None)
        if start is None:
            return None
        furthest = min(_FURTHEST, max(max(self._ops), max(self._usual)) - start + 1)
        for distance in range(1, furthest + 1):
            both = (self._shift_by(by, start) for by in (distance, -distance))
            found = [
                shift
                for shift in both
                if shift and (self._differ(start) or self._is_shown_by_lines(shift))
            ]
            if found:
                return found[0] if len(found) == 1 else self._likelier(*found)
        return None

    def _same_args(self, mine: Collective, theirs: Collective) -> bool:
        """Return whether op, step and sizes are equal."""
        return (
            mine.op == theirs.op
            and (mine.step == theirs.step or not self._compare_steps)
            and _sizes(mine) == _sizes(theirs)
        )

    def _learn(self, number: int) -> bool:
        """Return whether the collectives under a number fit, and if so, remember that their lines
        met.
        """
        mine, theirs = self._ops[number], self._usual[number]
        line, other = _line_of(mine), _line_of(theirs)
        if not self._same_args(mine, theirs) or self._lines.get(line) not in (None, other):
            return False
        self._lines[line] = other
        return True

    def _fits(self, mine: Collective, theirs: Collective) -> bool:
        """Return whether the collectives are equal, up to lines that met before or that are new."""
        line, other = _line_of(mine), _line_of(theirs)
        met_before = self._lines.get(line)
        return self._same_args(mine, theirs) and (line == other or met_before in (None, other))

    def _shift_by(self, by: int, start: int) -> Shift | None:
        """Return the shift by so many collectives, if enough of those that follow fit then: 2 of
        them; 3 from 2 places where only lines differ; or the only one that can, if it is the last
        one.

        Args:
            by: positive if the rank skipped collectives, negative if it issued extra ones.
            start: the first number under which the rank and the others differ.
        """
        ops, usual = self._ops, self._usual
        first = start if by > 0 else self._first_extra(start, by)
        pairs = []
        for mine, theirs in self._met_after(first, by):
            if not self._fits(mine, theirs):
                return None
            pairs.append((mine, theirs))
        if first == start and self._same_args(ops[start], usual[start]):
            places = {(_line_of(mine), mine.step) for mine, _ in pairs}
            enough = len(pairs) >= _MATCHES_OF_LINES and len(places) >= _PLACES
        else:
            is_last = min(max(ops), max(usual) - by) <= first + 1
            differs = _line_of(ops[start]) != _line_of(usual[start])
            one_decides = abs(by) == 1 and is_last and differs and not self._cut
            enough = len(pairs) >= (1 if one_decides else _MATCHES)
        if not enough:
            return None
        skipped = usual[first] if by > 0 else ops[first]
        departure: Departure = "skipped" if by > 0 else "extra"
        return Shift(self._rank, first, by, skipped, ops[first], len(pairs), departure)

    def _is_shown_by_lines(self, shift: Shift) -> bool:
        """Return whether the lines that the rank and the others share show a shift: before it, each
        of them met itself; after it, each meets another line, and would meet itself for a full
        round if the rank's collectives were moved by the shift.

        Lines of one branch alone show nothing, as two branches may come to theirs in any order and
        number::

            rank == 0   50  50  10  10  10  10
            others      20  21  20  21  20  21

        Steps alone do not tell, as a rank may step when it likes. They do if they were equal for
        several steps, and the ranks' last collectives show that something is wrong.
        """
        lines = {
            number: (_line_of(op), _line_of(self._usual[number]))
            for number, op in self._ops.items()
            if number in self._usual
        }
        own, theirs = (set(each) for each in zip(*lines.values(), strict=True))
        shared = own & theirs - {None}
        shifted = self._equal_lines_after(shift)
        apart = [
            number
            for number, pair in lines.items()
            if len(set(pair)) > 1 and not shared.isdisjoint(pair)
        ]
        begins = shift.number
        if begins - 1 in apart and lines[begins - 1][0] not in shared:
            begins -= 1  # a new line, by which the rank leaves its routine, may meet any line
        in_step = [
            mine for number, (mine, other) in lines.items() if number < begins and mine == other
        ]
        if min(apart, default=begins) < begins or not _is_a_round(shifted, in_step, shift.by):
            return False
        later = len(lines.keys() - range(shift.number))
        return len(apart) >= max(_MATCHES_OF_LINES, later / 2) or self._is_shown_by_steps(
            shift, sorted(lines)
        )

    def _equal_lines_after(self, shift: Shift) -> list[Hashable]:
        pairs = self._met_after(shift.number, shift.by)
        lines = [(_line_of(mine), _line_of(other)) for mine, other in pairs]
        return [mine for mine, other in lines if mine is not None and mine == other]

    def _is_shown_by_steps(self, shift: Shift, both: Sequence[int]) -> bool:
        """Return whether ranks that took several steps together before a shift end apart."""
        steps = {self._ops[number].step for number in both if number < shift.number}
        one_waits = max(self._usual) - max(self._ops) == shift.by and not self._cut
        differ = any(self._differ(number) for number in both if number >= shift.number)
        return len(steps) >= _MATCHES_OF_LINES and (one_waits or differ)

    def _differ(self, number: int) -> bool:
        """Return whether op or sizes differ, which no program may do."""
        mine, theirs = self._ops[number], self._usual[number]
        return mine.op != theirs.op or _sizes(mine) != _sizes(theirs)

    def _first_extra(self, start: int, by: int) -> int:
        """Return the number of the first extra collective, which may have paired up unnoticed
        before the first visible difference, at ``start``.

        Say the rank issues an extra one from line 30, which is new, so its line may legally
        differ::

            number   1   2   3   4
            others  20  21  22  23
            rank    20  30  21  22

        With ``by`` -1 and ``start`` 3, where line 21, which met line 21 before, meets 22, it is
        number 2: there the lines differ, and the rank's line under number 3 is that of the others
        under 2.
        """
        for number in range(start - 1, max(min(self._ops), start - _EARLIER) - 1, -1):
            own, later = self._ops.get(number), self._ops.get(number - by)
            other = self._usual.get(number)
            if not (own and later and other) or _line_of(later) != _line_of(other):
                return start
            if _line_of(own) != _line_of(other):
                return number
        return start

    def _likelier(self, skipped: Shift, extra: Shift) -> Shift:
        """Return, of two shifts that both fit, the one after which more lines are equal."""
        by_skipped, by_extra = (
            sum(
                _line_of(mine) != _line_of(theirs)
                for mine, theirs in self._met_after(shift.number, shift.by)
            )
            for shift in (skipped, extra)
        )
        if by_skipped == by_extra:
            skipped.departure = "either"
        return extra if by_extra < by_skipped else skipped

    def _met_after(self, start: int, by: int) -> Iterator[tuple[Collective, Collective]]:
        """Yield the rank's collectives from ``start`` on that come in a shift by ``by``, with those
        of the others that they then meet.
        """
        first = start - min(by, 0)
        for number, mine in self._ops.items():
            if number >= first and (theirs := self._usual.get(number + by)) is not None:
                yield mine, theirs


def _is_a_round(shifted: Sequence[Hashable], in_step: Sequence[Hashable], by: int) -> bool:
    """Return whether lines that met themselves before a shift do so again, for a full round."""
    lines = set(in_step)
    enough = max(_MATCHES_OF_LINES, len(lines), abs(by))
    return (
        lines.issuperset(shifted) and len(in_step) >= _MATCHES_OF_LINES and len(shifted) >= enough
    )


def _shift_of_two(job: JobIndex, tracks: Mapping[int, Track]) -> list[Shift]:
    """Return the shift of the one of two ranks that leaves its routine: each seems out of step to
    the other.
    """
    first, second = sorted(tracks)
    pairs = ((first, second), (second, first))
    cut = any(job.views[rank].lost_newest for rank in tracks)
    searches = (_ShiftSearch(rank, tracks[rank].ops, tracks[met].ops, cut) for rank, met in pairs)
    shifts = [shift for search in searches if (shift := search.find()) is not None]
    if culprits := _off_routine(job, tracks, shifts):
        return [shift for shift in shifts if shift.rank in culprits]
    # both say the same, each seen from one rank: return the one that skipped a collective
    ahead = [shift for shift in shifts if shift.by > 0][:1]
    for shift in ahead:
        shift.other = first + second - shift.rank
    return ahead


def _off_routine(job: JobIndex, ranks: Iterable[int], shifts: Sequence[Shift]) -> tuple[int, ...]:
    """Return the one of two ranks out of step that leaves its routine; none if nothing tells."""
    sides = [[rank] for rank in sorted(ranks)]
    left = [each.rank for each in shifts if leaves_routine(job.views[each.rank], each.own)]
    changed_pace = [each.rank for each in shifts if _changes_pace(job.views[each.rank], each.own)]
    return (by_routine(sides, left) or by_routine(sides, changed_pace) or UNDECIDED).culprits


def _changes_pace(view: RankView, op: Collective) -> bool:
    """Return whether a rank did another number of optimizer steps before this op than before any of
    its earlier ones.
    """
    ops = view.tracks[op.channel.key].ops
    steps = [ops[number].step for number in sorted(ops) if number <= op.sequence_number][-_RECENT:]
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
    # Compare all ranks with the first. If most differ from it in the same place, the first rank is
    # the odd one.
    base, *others = sorted(tracks)
    # the branch that swaps them may issue them from other lines, through the same functions
    for line in (_line_of, lambda op: op.call_lines[:1] or None):
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
