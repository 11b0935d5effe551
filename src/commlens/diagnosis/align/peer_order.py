"""Find ranks that issue the collectives of several groups, or messages and collectives, in another
order than their peers.

Ranks use groups of one kind alike, such as the rows of a mesh, and come to the line of a message
equally often. So ranks that have issued equally many collectives of each kind, and messages from
one line, should continue with the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence

from commlens.diagnosis.align.routine import position_in
from commlens.diagnosis.align.tie_break import is_majority
from commlens.diagnosis.index.job_index import GroupKind, JobIndex, RankView
from commlens.model.collective import ChannelKey, Collective, Frame

_BEFORE, _AFTER = 32, 128  # records of a rank to compare, around its first collective in flight

Line = tuple[str, Frame]
"""``"send"`` or ``"recv"``, and the source line."""
_MESSAGE: GroupKind = ("", 0, 0, 0)


def find_reordered(
    job: JobIndex, keys: Collection[ChannelKey], lines: Collection[Line] = ()
) -> dict[int, tuple[Collective, Collective]]:
    """Return the ranks that leave the order of the majority of their peers, and have not completed
    what the majority issued.

    Args:
        job: the indexed ranks.
        keys: the channels that deadlocked ranks wait in.
        lines: the lines of the messages that deadlocked ranks wait for. They count if the groups
            alone show no other order.

    Returns:
        By rank, the op with which it leaves the order, and a peer's op in the place.
    """
    kinds = job.group_kinds
    used = {kinds[key] for key in keys if key in kinds}  # not of calls that make groups
    found = _find(job, keys, kinds, used, None) if len(used) > 1 else {}
    for line in (
        sorted(lines, key=lambda line: (line[0], line[1].file, line[1].line))
        if used and not found
        else ()
    ):
        for rank, place in _find(job, keys, kinds, used, line).items():
            found.setdefault(rank, place)
    return found


def like_other_groups(
    job: JobIndex, key: ChannelKey, number: int, sides: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Return the sides whose collective is the one that all other groups of the kind have under
    this number; none if these differ.

    Args:
        job: the indexed ranks.
        key: the group's channel.
        number: of the collective on which its ranks disagree.
        sides: the ranks that agree with each other.
    """
    votes = _votes(job, key, number) - _votes_of(job, key, number)
    if len(votes) != 1 or votes.total() < 2:
        return []
    tracks = job.tracks_on(key)
    return [
        side
        for side in sides
        if {_asked(tracks[rank].ops[number]) for rank in side if rank in tracks} == votes.keys()
    ]


def is_outvoted(job: JobIndex, key: ChannelKey, number: int, ranks: Collection[int]) -> bool:
    """Return whether these ranks, a minority in their group, are none in all groups of its kind
    together.
    """
    own = _votes_of(job, key, number)
    tracks = job.tracks_on(key)
    odd = {
        _asked(tracks[rank].ops[number])
        for rank in ranks
        if rank in tracks and number in tracks[rank].ops
    }
    votes = _votes(job, key, number)
    return votes.total() > own.total() and sum(votes[asked] for asked in odd) * 2 >= votes.total()


def _votes(job: JobIndex, key: ChannelKey, number: int) -> Counter[Hashable]:
    """Count what all ranks issue under a number in the groups of one kind."""
    votes: Counter[Hashable] = Counter()
    for other, kind in job.group_kinds.items():
        if kind == job.group_kinds[key]:
            votes += _votes_of(job, other, number)
    return votes


def _votes_of(job: JobIndex, key: ChannelKey, number: int) -> Counter[Hashable]:
    return Counter(
        _asked(track.ops[number]) for track in job.tracks_on(key).values() if number in track.ops
    )


def _asked(op: Collective) -> Hashable:
    args = op.args
    root = (
        op.channel.group.ranks.index(args.root)
        if args.root in op.channel.group.ranks
        else args.root
    )
    return (args.op, args.inputs, args.outputs, args.reduce_op, root, op.call_lines)


def _find(
    job: JobIndex,
    keys: Collection[ChannelKey],
    kinds: Mapping[ChannelKey, GroupKind],
    used: Collection[GroupKind],
    line: Line | None,
) -> dict[int, tuple[Collective, Collective]]:
    own: dict[int, dict[GroupKind, ChannelKey]] = defaultdict(dict)
    for key, kind in kinds.items():
        for rank in key[2] if kind in used else ():
            own[rank][kind] = key
    following: dict[tuple[int, ...], dict[int, Collective]] = defaultdict(dict)
    members = {member for key in keys for member in key[2]} & job.views.keys()
    for rank in sorted(members):
        if len(own[rank]) == len(used):
            for state, op in _states(job.views[rank], own[rank], line):
                following[state].setdefault(rank, op)
    found: dict[int, tuple[Collective, Collective]] = {}
    for ops in following.values():
        of_rank = {
            rank: _MESSAGE if op.is_point_to_point else kinds[op.channel.key]
            for rank, op in ops.items()
        }
        [(usual, most), *others] = Counter(of_rank.values()).most_common()
        # Not all ranks come to a line: those that do may all be of one half of the job.
        alone = most > 2 and len(ops) - most == 1
        voters = ops if line is None or alone else job.views
        if not others or not is_majority(most, len(voters)):
            continue
        theirs = next(op for rank, op in ops.items() if of_rank[rank] == usual)
        for rank, op in ops.items():
            if of_rank[rank] == usual or (rank in found and op.index >= found[rank][0].index):
                continue
            view = job.views[rank]
            if usual == _MESSAGE:
                odd = 0 < _last_from(view, line) < theirs.sequence_number
            else:
                track = view.tracks.get(own[rank][usual])
                odd = track is None or track.completed < theirs.sequence_number
            # A rank may be the only one that has to exchange this message: its first one says
            # nothing in the first steps.
            if odd and (not op.is_point_to_point or op.sequence_number > 1 or view.has_routine(op)):
                found[rank] = (op, theirs)
    return found


def _last_from(view: RankView, line: Line | None) -> int:
    """Return the number of a rank's last message from a line; 0 without one."""
    return next(
        (op.sequence_number for op in reversed(view.history) if (op.op, op.source) == line), 0
    )


def _states(
    view: RankView, own: Mapping[GroupKind, ChannelKey], line: Line | None
) -> list[tuple[tuple[int, ...], Collective]]:
    """Return the ops of these channels, and the messages from the line, near the rank's first op in
    flight.

    With each op come the numbers of ops issued before, by kind.
    """
    keys = [own[kind] for kind in sorted(own)]
    tracks = [view.tracks.get(key) for key in keys]
    opened = [track.ops[track.open[0]] for track in tracks if track is not None and track.open]
    first = min(opened, key=lambda op: op.index, default=None)
    if (
        line is not None
        and view.blocks
        and all(block.op.is_point_to_point for block in view.blocks.values())
    ):
        first = min(
            [block.op for block in view.blocks.values()]
            + [op for op in (first,) if op is not None],
            key=lambda op: op.index,
        )
    position = position_in(view.history, first) if first is not None else len(view.history)
    if position is None:
        return []
    end = min(len(view.history), position + _AFTER)
    places: dict[ChannelKey | None, int] = {key: place for place, key in enumerate(keys)}

    def place_of(op: Collective) -> int | None:
        if op.is_point_to_point:
            return len(keys) if (op.op, op.source) == line else None
        return places.get(op.channel.key)

    start = max(0, position - _BEFORE)
    ops = [(place, op) for op in view.history[start:end] if (place := place_of(op)) is not None]
    counts = [-1] * len(keys) + [-1] * (line is not None)
    for place, op in reversed(ops):
        counts[place] = op.sequence_number - 1
    for place, track in enumerate(tracks):
        if counts[place] < 0 and track is None and not view.wrapped:
            counts[place] = 0
        elif counts[place] < 0 and track is not None and end == len(view.history):
            counts[place] = track.last
    if line is not None and not (view.wrapped and counts[-1] >= 0):
        earlier = (
            op.sequence_number
            for op in reversed(view.history[:start])
            if (op.op, op.source) == line
        )
        counts[-1] = next(earlier, -1 if view.wrapped else 0)
    if -1 in counts:
        return []
    states = []
    for place, op in ops:
        states.append((tuple(counts), op))
        counts[place] = op.sequence_number
    return states
