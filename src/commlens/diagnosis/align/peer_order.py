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
from typing import NamedTuple

from commlens.diagnosis.align.routine import position_in
from commlens.diagnosis.align.tie_break import is_majority
from commlens.diagnosis.index.job_index import GroupKind, JobIndex, RankView
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
    peers = _peers(job, keys, used, line)
    found: dict[int, tuple[Collective, Collective]] = {}
    for ops in _continued(peers):
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
            if of_rank[rank] != usual and is_first and peers[rank].left_out(op, theirs, usual):
                found[rank] = (op, theirs)
    return found


def _peers(
    job: JobIndex, keys: Iterable[ChannelKey], used: Collection[GroupKind], line: Line | None
) -> dict[int, _Peer]:
    """Return the members of some channels that have channels of all kinds in use."""
    own: dict[int, dict[GroupKind, ChannelKey]] = defaultdict(dict)  # of each rank: its row, column
    for key, kind in job.group_kinds.items():
        for rank in key[2] if kind in used else ():
            own[rank][kind] = key
    members = {member for key in keys for member in key[2]} & job.views.keys()
    return {
        rank: _Peer(job.views[rank], own[rank], line)
        for rank in sorted(members)
        if len(own[rank]) == len(used)
    }


def _continued(peers: Mapping[int, _Peer]) -> Iterable[dict[int, Collective]]:
    """Return, for each state in which ranks were, the op with which each of them continued: after 5
    in their row and 2 in their column, ``{0: row #6, 1: row #6, 3: column #3}``.
    """
    following: dict[tuple[int, ...], dict[int, Collective]] = defaultdict(dict)
    for rank, peer in peers.items():
        for state, op in peer.states():
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


_Series = ChannelKey | tuple[str, Frame | None]
"""Ops that are counted together: of a channel, or messages of one direction from one line."""


class _Peer(NamedTuple):
    """A rank whose order is compared with that of its peers."""

    view: RankView
    own: Mapping[GroupKind, ChannelKey]  # its channels of the kinds that are compared
    line: Line | None  # of the messages that are compared, too

    def states(self) -> list[tuple[tuple[int, ...], Collective]]:
        """Return the compared ops near the rank's first op in flight, each with the state before
        it: how many ops the rank had issued, by kind.

        If a rank had issued 5 collectives in its row and 2 in its column, and continued in its row,
        its row and its column, the result is ``[((5, 2), row #6), ((6, 2), row #7), ((7, 2), column
        #3)]``. With a line, the last number counts the messages from there. Empty if one of the
        first numbers is not known.
        """
        history, keys = self.view.history, [self.own[kind] for kind in sorted(self.own)]
        first = self._first_in_flight(keys)
        position = position_in(history, first) if first is not None else len(history)
        if position is None:
            return []
        start, end = max(0, position - _BEFORE), min(len(history), position + _AFTER)
        series: list[_Series] = [*keys, *filter(None, [self.line])]
        ops: list[tuple[int, Collective]] = []  # with the places of their series
        for op in history[start:end]:
            of: _Series = (op.op, op.source) if op.is_point_to_point else op.channel.key
            if of in series:
                ops.append((series.index(of), op))
        firsts = {place: op.sequence_number for place, op in reversed(ops)}
        counts = [
            self._issued_before(key, firsts.get(place, 0), at_end=end == len(history))
            for place, key in enumerate(keys)
        ]
        if self.line is not None:
            counts.append(self._sent_before(start, firsts.get(len(keys), 0)))
        states = []
        for place, op in ops if -1 not in counts else ():
            states.append((tuple(counts), op))
            counts[place] = op.sequence_number
        return states

    def left_out(self, op: Collective, theirs: Collective, kind: GroupKind) -> bool:
        """Return whether the rank, which continued with ``op``, has not done what its peers
        continued with: ``theirs``, an op of this kind.
        """
        if kind == _MESSAGE:
            is_behind = 0 < self._last_message(self.view.history) < theirs.sequence_number
        else:
            track = self.view.tracks.get(self.own[kind])
            is_behind = track is None or track.completed < theirs.sequence_number
        # A rank may be the only one that has to exchange this message: its first one says nothing
        # in the first steps.
        is_telling = not op.is_point_to_point or op.sequence_number > 1 or self.view.has_routine(op)
        return is_behind and is_telling

    def _first_in_flight(self, keys: Iterable[ChannelKey]) -> Collective | None:
        """Return the rank's first op in flight of these channels; with a line, also the message
        that it is blocked in.
        """
        tracks = [self.view.tracks[key] for key in keys if key in self.view.tracks]
        opened = [track.ops[track.open[0]] for track in tracks if track.open]
        blocks = [block.op for block in self.view.blocks.values()]
        if self.line is not None and all(op.is_point_to_point for op in blocks):
            opened += blocks
        return min(opened, key=lambda op: op.index, default=None)

    def _issued_before(self, key: ChannelKey, first: int, *, at_end: bool) -> int:
        """Return how many ops of a channel the rank issued before the compared ones; -1 if that is
        not known.

        Args:
            key: of the channel.
            first: number of the first one that is compared; 0 if there is none.
            at_end: whether the rank's last records are among those compared.
        """
        track = self.view.tracks.get(key)
        if first:
            return first - 1
        if track is None:  # the rank issued none, as far as its records go
            return -1 if self.view.wrapped else 0
        return track.last if at_end else -1

    def _sent_before(self, start: int, first: int) -> int:
        """Return the number of the last message from the line before record ``start``; 0 if there
        is none, -1 if that is not known. ``first``: number of the first compared one, 0 if there is
        none.
        """
        if self.view.wrapped and first:
            return first - 1
        return self._last_message(self.view.history[:start]) or (-1 if self.view.wrapped else 0)

    def _last_message(self, history: Sequence[Collective]) -> int:
        """Return the number of the last message from the line in these records; 0 without one."""
        ops = (op for op in reversed(history) if (op.op, op.source) == self.line)
        return next((op.sequence_number for op in ops), 0)


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
