"""Find ranks that issue the collectives of several groups, or messages and collectives, in another
order than their peers. And compare what a group issues with the other groups of its kind.

Ranks use groups of one kind alike, such as the rows of a mesh, and come to the line of a message
equally often. So ranks that have issued equally many collectives of each kind, and messages from
one line, should continue with the same. Say that after 5 collectives in their row and 2 in their
column, ranks 0-2 continued in their row and rank 3 in its column: rank 3 left the order, and
:func:`find_reordered` returns its column #3 with a peer's row #6.

Where two ranks of a row disagree, nobody has a majority. But if the ranks of all other rows issued
an all_reduce there, the one that issued another op is odd (:func:`like_other_groups`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from commlens.diagnosis.align.routine import position_in
from commlens.diagnosis.align.tie_break import is_majority
from commlens.diagnosis.index.job_index import GroupKind, JobIndex, RankView, Track
from commlens.model.collective import ChannelKey, Collective, Frame

_BEFORE, _AFTER = 32, 128  # records of a rank to compare, around its first op in flight

Line = tuple[str, Frame]
"""``"send"`` or ``"recv"``, and the source line."""
_MESSAGE: GroupKind = ("", 0, 0, 0)  # stands for a message among the kinds of groups


# --- the order in which ranks continue


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
    found = _find(job, keys, used, None) if len(used) > 1 else {}
    if found or not used:
        return found
    for line in sorted(lines, key=lambda line: (line[0], line[1].file, line[1].line)):
        for rank, ops in _find(job, keys, used, line).items():
            found.setdefault(rank, ops)
    return found


def _find(
    job: JobIndex, keys: Collection[ChannelKey], used: Collection[GroupKind], line: Line | None
) -> dict[int, tuple[Collective, Collective]]:
    """Do the work of :func:`find_reordered` for the groups of some kinds, and the messages from one
    line or none.
    """
    kinds = job.group_kinds
    own = _channels_of_ranks(kinds, used)  # of each rank: its row, its column
    found: dict[int, tuple[Collective, Collective]] = {}
    members = {member for key in keys for member in key[2]} & job.views.keys()
    for ops in _continued(job, sorted(members), own, len(used), line):
        of_rank = {
            rank: _MESSAGE if op.is_point_to_point else kinds[op.channel.key]
            for rank, op in ops.items()
        }
        usual = _usual(of_rank, len(job.views) if line is not None else len(ops))
        if usual is None:
            continue
        theirs = next(op for rank, op in ops.items() if of_rank[rank] == usual)
        for rank, op in ops.items():
            is_first = rank not in found or op.index < found[rank][0].index
            if of_rank[rank] == usual or not is_first:
                continue
            if _left_out(job.views[rank], op, theirs, own[rank].get(usual), line):
                found[rank] = (op, theirs)
    return found


def _channels_of_ranks(
    kinds: Mapping[ChannelKey, GroupKind], used: Collection[GroupKind]
) -> Mapping[int, Mapping[GroupKind, ChannelKey]]:
    """Return each rank's own channels, by kind: its row, its column."""
    own: dict[int, dict[GroupKind, ChannelKey]] = defaultdict(dict)
    for key, kind in kinds.items():
        for rank in key[2] if kind in used else ():
            own[rank][kind] = key
    return own


def _continued(
    job: JobIndex,
    ranks: Iterable[int],
    own: Mapping[int, Mapping[GroupKind, ChannelKey]],
    count: int,
    line: Line | None,
) -> Iterable[dict[int, Collective]]:
    """Return, for each state in which ranks were, the op with which each of them continued: after 5
    in their row and 2 in their column, ``{0: row #6, 1: row #6, 3: column #3}``. Ranks without
    channels of all kinds, ``count`` of them, are left out.
    """
    following: dict[tuple[int, ...], dict[int, Collective]] = defaultdict(dict)
    for rank in ranks:
        if len(own[rank]) == count:
            for state, op in _states(job.views[rank], own[rank], line):
                following[state].setdefault(rank, op)
    return following.values()


def _usual(of_rank: Mapping[int, GroupKind], voters: int) -> GroupKind | None:
    """Return the kind with which most ranks continue; None if all do, or if no kind has a majority
    of the voters.
    """
    [(usual, most), *others] = Counter(of_rank.values()).most_common()
    # Not all ranks come to the line of a message: those that do may all be of one half of the job,
    # and the other half may do as the odd one. So all ranks of the job are voters then, unless
    # one of at least four is alone.
    is_one_alone = most > 2 and len(of_rank) - most == 1
    is_usual = is_majority(most, len(of_rank) if is_one_alone else voters)
    return usual if others and is_usual else None


def _left_out(
    view: RankView, op: Collective, theirs: Collective, key: ChannelKey | None, line: Line | None
) -> bool:
    """Return whether a rank that continued with ``op`` has not done what its peers continued with.

    Args:
        view: of the rank.
        op: with which it continued.
        theirs: a peer's op.
        key: the rank's own channel of that kind; None: it is a message.
        line: of the messages.
    """
    if key is None:
        is_behind = 0 < _last_from(view.history, line) < theirs.sequence_number
    else:
        track = view.tracks.get(key)
        is_behind = track is None or track.completed < theirs.sequence_number
    # A rank may be the only one that has to exchange this message: its first one says nothing in
    # the first steps.
    is_telling = not op.is_point_to_point or op.sequence_number > 1 or view.has_routine(op)
    return is_behind and is_telling


def _last_from(history: Sequence[Collective], line: Line | None) -> int:
    """Return the number of a rank's last message from a line; 0 without one."""
    return next((op.sequence_number for op in reversed(history) if (op.op, op.source) == line), 0)


_Series = ChannelKey | tuple[str, Frame | None]
"""Ops that are counted together: of a channel, or messages of one direction from one line."""


def _states(
    view: RankView, own: Mapping[GroupKind, ChannelKey], line: Line | None
) -> list[tuple[tuple[int, ...], Collective]]:
    """Return the ops of these channels, and the messages from the line, near the rank's first op in
    flight, each with the state before it: how many ops the rank had issued, by kind.

    If a rank had issued 5 collectives in its row and 2 in its column, and continued in its row,
    its row and its column, the result is ``[((5, 2), row #6), ((6, 2), row #7), ((7, 2), column
    #3)]``. With a line, the last number counts the messages from there. Empty if one of the first
    numbers is not known.
    """
    keys = [own[kind] for kind in sorted(own)]
    tracks = list(map(view.tracks.get, keys))
    first = _first_in_flight(view, tracks, line)
    position = position_in(view.history, first) if first is not None else len(view.history)
    if position is None:
        return []
    start, end = max(0, position - _BEFORE), min(len(view.history), position + _AFTER)
    series: list[_Series] = [*keys, *filter(None, [line])]
    ops: list[tuple[int, Collective]] = []  # with the places of their series
    for op in view.history[start:end]:
        of: _Series = (op.op, op.source) if op.is_point_to_point else op.channel.key
        if of in series:
            ops.append((series.index(of), op))
    firsts = {place: op.sequence_number for place, op in reversed(ops)}
    counts = [
        firsts[place] - 1
        if place in firsts
        else _issued(view, track, at_end=end == len(view.history))
        for place, track in enumerate(tracks)
    ]
    if line is not None:
        counts.append(_issued_from(view, line, start, firsts.get(len(keys), 0)))
    states = []
    for place, op in ops if -1 not in counts else ():
        states.append((tuple(counts), op))
        counts[place] = op.sequence_number
    return states


def _first_in_flight(
    view: RankView, tracks: Iterable[Track | None], line: Line | None
) -> Collective | None:
    """Return the rank's first op in flight of these tracks; with a line, also the message that it
    is blocked in.
    """
    opened = [track.ops[track.open[0]] for track in tracks if track is not None and track.open]
    blocks = [block.op for block in view.blocks.values()]
    if line is not None and all(op.is_point_to_point for op in blocks):
        opened += blocks
    return min(opened, key=lambda op: op.index, default=None)


def _issued(view: RankView, track: Track | None, *, at_end: bool) -> int:
    """Return how many ops of a track the rank issued before the compared ops, none of which is of
    this track; -1 if that is not known.

    Args:
        view: of the rank.
        track: None: the rank issued none, as far as its records go.
        at_end: whether the rank's last records are among those compared.
    """
    if track is None:
        return -1 if view.wrapped else 0
    return track.last if at_end else -1


def _issued_from(view: RankView, line: Line, start: int, first: int) -> int:
    """Return the number of the last message from a line before record ``start``; 0 if there is
    none, -1 if that is not known.

    Args:
        view: of the rank.
        line: of the messages.
        start: the first of the compared records.
        first: number of the first message among these; 0 if there is none.
    """
    if view.wrapped and first:
        return first - 1
    return _last_from(view.history[:start], line) or (-1 if view.wrapped else 0)


# --- the other groups of a kind


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
        if {_request(tracks[rank].ops[number]) for rank in side if rank in tracks} == votes.keys()
    ]


def is_outvoted(job: JobIndex, key: ChannelKey, number: int, ranks: Collection[int]) -> bool:
    """Return whether these ranks, a minority in their group, are none in all groups of its kind
    together.
    """
    own = _votes_of(job, key, number)
    tracks = job.tracks_on(key)
    odd = {
        _request(tracks[rank].ops[number])
        for rank in ranks
        if rank in tracks and number in tracks[rank].ops
    }
    votes = _votes(job, key, number)
    return votes.total() > own.total() and sum(votes[each] for each in odd) * 2 >= votes.total()


def _votes(job: JobIndex, key: ChannelKey, number: int) -> Counter[Hashable]:
    """Count what all ranks issue under a number in the groups of one kind."""
    votes: Counter[Hashable] = Counter()
    for other, kind in job.group_kinds.items():
        if kind == job.group_kinds[key]:
            votes += _votes_of(job, other, number)
    return votes


def _votes_of(job: JobIndex, key: ChannelKey, number: int) -> Counter[Hashable]:
    return Counter(
        _request(track.ops[number]) for track in job.tracks_on(key).values() if number in track.ops
    )


def _request(op: Collective) -> Hashable:
    """Return what is equal for the same collective in two groups of one kind: its arguments, with
    the root's place in the group, and its lines.
    """
    args, ranks = op.args, op.channel.group.ranks
    root = ranks.index(args.root) if args.root in ranks else args.root
    return (args.op, args.inputs, args.outputs, args.reduce_op, root, op.call_lines)
