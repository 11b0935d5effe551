"""A rank that is out of step: it skipped a collective (or issued one too many), and everything after pairs up wrongly.

Where the op and the shape are the same, nothing on the wire tells. The lines that issued them and the optimizer steps do: from
some number on, what the rank issues is what the others issue later. Lines differ legally between ranks
(``if rank == 0: ... else: ...``), so a rank's lines are first translated into the others' by what they met before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec

from commlens.diagnosis.index import Track, World
from commlens.diagnosis.routine import expected_token, token
from commlens.model.collective import ChannelKey, Collective

_FURTHEST = 256  # collectives that can be skipped at once and still be found

_Core = tuple[Hashable, ...]


class Shift(msgspec.Struct):
    """From ``number`` on, ``rank`` is ``by`` collectives ahead of the others' sequence (behind it, where negative)."""

    rank: int
    number: int
    by: int
    skipped: Collective  # what the others issued under that number; for a negative shift, the one too many
    own: Collective  # what the rank issued under that number
    matches: int  # how many later collectives agree with it


def find_shifts(world: World, key: ChannelKey) -> list[Shift]:
    """Ranks of a channel that are out of step, in order of rank."""
    tracks = {rank: world.views[rank].tracks[key] for rank in world.users.get(key, ())}
    if world.foreign:
        from commlens.diagnosis.window import different

        tracks = different(tracks)  # of ranks whose lines are the same a few stand for all
    if len(tracks) < 2:
        return []
    numbers = sorted({number for track in tracks.values() for number in track.ops})
    suspects = _suspects(tracks, numbers)
    if not suspects:
        return []
    if len(tracks) == 2:
        return _of_two(world, tracks)
    shifts = []
    for rank in sorted(suspects):
        others = {
            other: track for other, track in tracks.items() if other != rank and (other not in suspects or len(suspects) * 2 > len(tracks))
        }
        reference = _majority(others, numbers)
        shift = _compare(rank, tracks[rank], reference)
        if shift is not None:
            shifts.append(shift)
    # Shifted against a majority, half of the ranks or more are not the odd ones.
    return shifts if len(shifts) * 2 < len(tracks) else []


def _core(op: Collective) -> _Core:
    """What must be equal even if the lines differ: the op, the step, the size."""
    return (op.op, op.step, _sizes(op))


def _sizes(op: Collective) -> tuple[int, ...]:
    return tuple(spec.numel for spec in op.args.inputs)


def _site(op: Collective) -> Hashable:
    source = op.source
    return (source.file, source.line) if source is not None else None


def _suspects(tracks: Mapping[int, Track], numbers: Sequence[int]) -> set[int]:
    """Ranks that at some number have another step, op, size or line than most others."""
    suspects: set[int] = set()
    # Records of one rank share their asks and stacks, so most of the work is done once for each.
    asks: dict[int, tuple[int, ...]] = {}
    sites: dict[int, Hashable] = {}

    def token_of(op: Collective) -> Hashable:
        sizes = asks.get(id(op.args))
        if sizes is None:
            sizes = asks[id(op.args)] = _sizes(op)
        stack = id(op.stack)
        if stack not in sites:
            sites[stack] = _site(op)
        return (op.args.op, op.step, sizes, sites[stack])

    for number in numbers:
        met = {rank: track.ops[number] for rank, track in tracks.items() if number in track.ops}
        if len(met) < 2:
            continue
        tokens = {rank: token_of(op) for rank, op in met.items()}
        if len(set(tokens.values())) > 1:
            counts = Counter(tokens.values())
            (usual, most), (_, second) = counts.most_common(2)
            suspects.update(rank for rank, value in tokens.items() if most == second or value != usual)
    return suspects


def _majority(tracks: Mapping[int, Track], numbers: Sequence[int]) -> dict[int, Collective]:
    """For each number, the op that most of these ranks issued."""
    reference: dict[int, Collective] = {}
    for number in numbers:
        met = [track.ops[number] for _, track in sorted(tracks.items()) if number in track.ops]
        if not met:
            continue
        counts = Counter((_core(op), _site(op)) for op in met)
        usual = max(counts, key=lambda value: counts[value])
        reference[number] = next(op for op in met if (_core(op), _site(op)) == usual)
    return reference


def _compare(rank: int, track: Track, reference: Mapping[int, Collective]) -> Shift | None:
    numbers = sorted(set(track.ops) & set(reference))
    if not numbers:
        return None
    own_sites: dict[Hashable, Hashable] = {}  # this rank's line to the others'
    steps_comparable = True
    start: int | None = None
    only_line = False
    for number in numbers:
        mine, theirs = track.ops[number], reference[number]
        if steps_comparable and number == numbers[0] and mine.step != theirs.step:
            steps_comparable = False  # one of them counts no steps, or they start elsewhere
        same_step = mine.step == theirs.step or not steps_comparable
        same = mine.op == theirs.op and same_step and _core(mine)[2] == _core(theirs)[2]
        known = own_sites.get(_site(mine))
        if same and (known is None or known == _site(theirs)):
            own_sites[_site(mine)] = _site(theirs)
            continue
        start, only_line = number, same
        break
    if start is None:
        return None

    def equal(mine: Collective, theirs: Collective) -> bool:
        if mine.op != theirs.op or (steps_comparable and mine.step != theirs.step) or _core(mine)[2] != _core(theirs)[2]:
            return False
        known = own_sites.get(_site(mine))
        return _site(mine) == _site(theirs) or known is None or known == _site(theirs)

    last_mine, last_theirs = max(track.ops), max(reference)
    for by in range(1, _FURTHEST + 1):
        for sign in (1, -1):
            matches, places = _matches(track, reference, start, by * sign, equal)
            # One match may be chance, unless that is all there is to see. A line may legally serve several of the others', so a
            # line alone must explain more.
            alone = abs(by) == 1 and matches == 1 and min(last_mine, last_theirs - by * sign) <= start + 1
            if (matches >= 3 and places >= 2) if only_line else (matches >= 2 or alone):
                skipped = reference[start] if sign > 0 else track.ops[start]
                return Shift(rank, start, by * sign, skipped, track.ops[start], matches)
        if start + by > max(last_mine, last_theirs):
            break
    return None


def _matches(
    track: Track, reference: Mapping[int, Collective], start: int, by: int, equal: Callable[[Collective, Collective], bool]
) -> tuple[int, int]:
    """How many collectives from ``start`` on fit when moved by ``by``, and in how many places of the program; 0 if one does not."""
    matches = 0
    places: set[Hashable] = set()
    first = start if by > 0 else start - by
    for number in track.ops:
        theirs = reference.get(number + by) if number >= first else None
        if theirs is None:
            continue
        mine = track.ops[number]
        if not equal(mine, theirs):
            return 0, 0
        matches += 1
        places.add((_site(mine), mine.step))
    return matches, len(places)


def _of_two(world: World, tracks: Mapping[int, Track]) -> list[Shift]:
    """Of two ranks, each is out of step as seen from the other: the one that leaves its own routine is."""
    (first, second) = sorted(tracks)
    candidates = []
    for rank, other in ((first, second), (second, first)):
        shift = _compare(rank, tracks[rank], tracks[other].ops)
        if shift is not None:
            candidates.append((shift, _keeps_routine(world, rank, shift.own)))
    odd = [shift for shift, keeps in candidates if keeps is False]
    if len(odd) == 1:
        return odd
    # Forgetting a collective is more common than issuing one too many.
    return [shift for shift, _ in candidates if shift.by > 0][:1]


def _keeps_routine(world: World, rank: int, own: Collective) -> bool | None:
    ops = world.views[rank].history
    position = next((i for i, op in enumerate(ops) if op.index == own.index), None)
    if position is None:
        return None
    return expected_token([token(op) for op in ops[: position + 1]], position)


def skips_by_habit(world: World, rank: int, own: Collective, expected: Collective) -> bool:
    """Whether ``own`` is what the rank usually issues some time after ``expected``: then it left that one out.

    For the case that the others still wait in ``expected``, so that their next one is not known.
    """
    history = [op for op in world.views[rank].history if op.index < own.index]
    habit = [(op.op, op.channel.key, _site(op)) for op in history[-512:]]
    wanted = (expected.op, expected.channel.key)
    mine = (own.op, own.channel.key, _site(own))
    at = next((i for i in range(len(habit) - 1, -1, -1) if habit[i] == mine), None)
    if at is None:
        return False
    # Between the last time that it issued this and the time before, it issued what it leaves out now.
    before = next((i for i in range(at - 1, -1, -1) if habit[i] == mine), -1)
    between = habit[before + 1 : at]
    since = habit[at + 1 :]
    return any(item[:2] == wanted for item in between) and sum(i[:2] == wanted for i in since) < sum(i[:2] == wanted for i in between)
