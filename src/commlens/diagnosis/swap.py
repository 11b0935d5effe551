"""A rank that once issued collectives of one shape in another order than the others: nothing on the wire tells.

The lines do. All through the program each of the rank's lines meets one and the same line of the others; here, for a few collectives
in a row, the same lines meet in another order. Lines may differ between ranks by right, and meet several others by right: then
nothing is said. It stays a suspicion: a warning, never more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

import msgspec

from commlens.diagnosis.index import Track, World
from commlens.diagnosis.routine import expected_token, token
from commlens.model.collective import ChannelKey, Collective

_LONGEST = 16  # collectives that can be in another order
_SEEN_BEFORE = 4  # times that two lines must have met


class Swap(msgspec.Struct):
    """From ``number`` on, ``rank`` issued what the others issued in another order."""

    rank: int
    number: int
    own: list[Collective]
    others: list[Collective]


def find_swaps(world: World, key: ChannelKey) -> list[Swap]:
    """Ranks of a channel that once had another order, by rank."""
    tracks = {rank: world.views[rank].tracks[key] for rank in world.users.get(key, ())}
    if len(tracks) < 2:
        return []
    # All are held against the first rank. Where most differ from it in the same way, it is the odd one itself.
    base, *others = sorted(tracks)
    found = [swap for rank in others if (swap := _compare(rank, tracks[rank], tracks[base].ops)) is not None]
    if not found:
        return []
    if len(tracks) == 2:
        (swap,) = found
        turned = Swap(base, swap.number, swap.others, swap.own)
        odd = [one for one in (swap, turned) if _leaves_routine(world, one)]
        return odd if len(odd) == 1 else []
    if len(found) * 2 < len(tracks):
        return found
    same = [swap for swap in found if swap.number == found[0].number]
    if len(same) == len(others):
        return [Swap(base, same[0].number, same[0].others, same[0].own)]
    return []


def _line(op: Collective) -> Hashable:
    source = op.source
    return (source.file, source.line) if source is not None else None


def _alike(mine: Collective, theirs: Collective) -> bool:
    return (mine.op, mine.step, mine.args.inputs) == (theirs.op, theirs.step, theirs.args.inputs)


def _compare(rank: int, track: Track, reference: Mapping[int, Collective]) -> Swap | None:
    numbers = sorted(set(track.ops) & set(reference))
    met = Counter((_line(track.ops[n]), _line(reference[n])) for n in numbers)
    usual: dict[Hashable, Hashable] = {}
    for (mine, theirs), _ in met.most_common():
        usual.setdefault(mine, theirs)
    if len(set(usual.values())) < len(usual):
        return None  # one line of theirs serves several of ours
    odd = [n for n in numbers if usual[_line(track.ops[n])] != _line(reference[n])]
    if len(odd) < 2 or odd[-1] - odd[0] != len(odd) - 1 or len(odd) > _LONGEST:
        return None  # not in a row: these lines meet several others
    own, others = [track.ops[n] for n in odd], [reference[n] for n in odd]
    if Counter(usual[_line(op)] for op in own) != Counter(_line(op) for op in others):
        return None
    if not all(_alike(mine, theirs) for mine, theirs in zip(own, others, strict=True)):
        return None  # that is a disagreement, or a shift
    if any(met[(_line(op), usual[_line(op)])] < _SEEN_BEFORE or op.concurrent for op in own):
        return None
    return Swap(rank, odd[0], own, others)


def _leaves_routine(world: World, swap: Swap) -> bool:
    """Of two ranks each has another order than the other: the odd one does here what it never did before."""
    history = world.views[swap.rank].history
    position = next((i for i, op in enumerate(history) if op.index == swap.own[0].index), None)
    if position is None:
        return False
    return expected_token([token(op) for op in history[: position + 1]], position) is False
