"""Find ranks that issue the collectives of several groups in another order than their peers.

Ranks use groups of one kind alike, such as the rows of a mesh. So ranks that have issued equally many collectives of each kind
should continue with the same kind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from commlens.diagnosis.index import JobIndex, RankView
from commlens.diagnosis.routine import position_in
from commlens.model.collective import ChannelKey, Collective

_BEFORE, _AFTER = 32, 128  # records of a rank to compare, around its first collective in flight

Kinds = dict[ChannelKey, tuple[str, int, int, int]]
"""By channel: the group's description, number of ranks and stride, and a number that tells such groups of one rank apart."""


def find_reordered(job: JobIndex, keys: Collection[ChannelKey]) -> dict[int, tuple[Collective, Collective]]:
    """Return the ranks that leave the order of the majority of their peers, and have not completed what the majority issued.

    Args:
        job: the indexed ranks.
        keys: the channels that deadlocked ranks wait in.

    Returns:
        By rank, the op with which it leaves the order, and a peer's op in the place.
    """
    kinds = _kinds(job)
    used = {kinds[key] for key in keys if key in kinds}  # not of calls that make groups
    if len(used) < 2:
        return {}
    own: dict[int, dict[tuple[str, int, int, int], ChannelKey]] = defaultdict(dict)
    for key, kind in kinds.items():
        for rank in key[2] if kind in used else ():
            own[rank][kind] = key
    following: dict[tuple[int, ...], dict[int, Collective]] = defaultdict(dict)
    for rank in sorted({member for key in keys for member in key[2]} & job.views.keys()):
        if len(own[rank]) == len(used):
            for state, op in _states(job.views[rank], [own[rank][kind] for kind in sorted(used)]):
                following[state].setdefault(rank, op)
    found: dict[int, tuple[Collective, Collective]] = {}
    for ops in following.values():
        [(usual, most), *others] = Counter(kinds[op.channel.key] for op in ops.values()).most_common()
        if not others or most * 2 <= len(ops):
            continue
        theirs = next(op for op in ops.values() if kinds[op.channel.key] == usual)
        for rank, op in ops.items():
            if kinds[op.channel.key] != usual and (rank not in found or op.index < found[rank][0].index):
                track = job.views[rank].tracks.get(own[rank][usual])
                if track is None or track.completed < theirs.sequence_number:
                    found[rank] = (op, theirs)
    return found


def _kinds(job: JobIndex) -> Kinds:
    kinds: Kinds = {}
    taken: dict[tuple[str, int, int], Counter[int]] = defaultdict(Counter)  # by rank: its groups of the kind
    for key, channel in sorted(job.channels.items(), key=lambda item: (len(item[0][1]), item[0])):
        ranks = key[2]
        alike = (channel.group.description, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 0)
        number = max((taken[alike][rank] for rank in ranks), default=0)
        taken[alike].update(dict.fromkeys(ranks, 1))
        kinds[key] = (*alike, number)
    return kinds


def _states(view: RankView, keys: list[ChannelKey]) -> list[tuple[tuple[int, ...], Collective]]:
    """Return the ops of these channels near the rank's first op in flight, each with the numbers of ops issued before."""
    tracks = [view.tracks.get(key) for key in keys]
    opened = [track.ops[track.open[0]] for track in tracks if track is not None and track.open]
    position = position_in(view.history, min(opened, key=lambda op: op.index)) if opened else len(view.history)
    if position is None:
        return []
    end = min(len(view.history), position + _AFTER)
    places = {key: place for place, key in enumerate(keys)}
    ops = [op for op in view.history[max(0, position - _BEFORE) : end] if op.channel.key in places and not op.is_point_to_point]
    counts = [-1] * len(keys)
    for op in reversed(ops):
        counts[places[op.channel.key]] = op.sequence_number - 1
    for place, track in enumerate(tracks):
        if counts[place] < 0 and track is None and not view.wrapped:
            counts[place] = 0
        elif counts[place] < 0 and track is not None and end == len(view.history):
            counts[place] = track.last
    if -1 in counts:
        return []
    states = []
    for op in ops:
        states.append((tuple(counts), op))
        counts[places[op.channel.key]] = op.sequence_number
    return states
