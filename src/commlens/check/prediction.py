"""The sequence that a rank would have if it did the same as another rank: the same calls, in the
rank's own groups.

The rank's groups are those along the same dimensions. A root has the same place in the group; a
peer is at the same distance or at the same place. In a world of eight with tensor parallel groups
of two, ``broadcast(root 0)`` in group (0, 1) on rank 0 becomes ``broadcast(root 6)`` in group
(6, 7) on rank 7, and a send from rank 0 to rank 2 in (0, 2, 4, 6) becomes one from rank 5 to rank 7
in (1, 3, 5, 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from commlens.check.sequence import Event, Issue, Leave, RankSequence, Setup, StoreCall, ThreadWait
from commlens.model.collective import Channel, Collective, CollectiveArgs

Group = tuple[int, tuple[int, ...]]
"""The incarnation and the ranks of a group."""

Names = Mapping[Group, Sequence[str]]
"""The names of all groups of the same ranks, in the order in which they are made."""

_NAMELESS_SETUPS = ("init_process_group", "init_device_mesh", "split_group")


class Dimension(NamedTuple):
    """Groups of ``size`` ranks at equal distances, which divide the world: a dimension of a mesh,
    the ranks of a node, the world itself.
    """

    stride: int
    size: int

    def position(self, rank: int) -> int:
        """Return a rank's place in its group."""
        return rank // self.stride % self.size

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank."""
        first = rank - self.position(rank) * self.stride
        return tuple(range(first, first + self.stride * self.size, self.stride))


def dimension_of(ranks: tuple[int, ...]) -> Dimension | None:
    """Return the dimension to which a group belongs; None if its ranks are not at equal
    distances.
    """
    if len(ranks) < 2:
        return None
    found = Dimension(ranks[1] - ranks[0], len(ranks))
    return found if found.stride > 0 and found.ranks(ranks[0]) == ranks else None


def names_in(sequences: Iterable[RankSequence]) -> dict[Group, list[str]]:
    """Return the names of all groups, collected from all ranks: a rank often sees only the groups
    that it makes.
    """
    found: dict[Group, list[str]] = {}
    for sequence in sequences:
        own: dict[Group, list[str]] = {}
        for event in sequence.events:
            call = _call(event)
            if call is None or call.is_store_wait or call.op in _NAMELESS_SETUPS:
                continue
            group = call.channel.group
            names = own.setdefault((group.incarnation, group.ranks), [])
            if group.name not in names:
                names.append(group.name)
        for key, names in own.items():
            if len(names) > len(found.get(key, ())):
                found[key] = names
    return found


def fixed_peers(like: RankSequence, others: Iterable[RankSequence]) -> frozenset[int]:
    """Return the indices of messages whose peer is at the same place of the group for all ranks
    that do the same, such as a first rank to which all send.
    """
    return frozenset(
        op.index
        for other in others
        for op, its in zip(like.ops, other.ops, strict=False)
        if op.peer is not None
        and its.peer is not None
        and _place(op, like.rank) != _place(its, other.rank)
        and _place(op, op.peer) == _place(its, its.peer)
    )


def predict(
    like: RankSequence, rank: int, names: Names, fixed: frozenset[int] | None = frozenset()
) -> RankSequence | None:
    """Return the sequence of a rank that does the same as another rank; None if the rank is not in
    one of the other rank's groups.

    Args:
        like: the sequence of the other rank.
        rank: the rank.
        names: of groups.
        fixed: the indices of messages whose peer is at a fixed place of the group; None: all are.
    """
    try:
        events = _MovedSequence(like, rank, names, fixed).events()
    except _NotAMember:
        return None
    return msgspec.structs.replace(like, rank=rank, events=events)


def does_as(like: RankSequence, other: RankSequence, names: Names) -> bool:
    """Check whether a rank does the same as another one: each peer may be at the same distance as
    the other rank's, or at the same place.
    """
    if _facts(like) != _facts(other) or len(like.events) != len(other.events):
        return False
    at_distance = predict(like, other.rank, names)
    at_place = predict(like, other.rank, names, fixed=None)
    if at_distance is None or at_place is None:
        return False
    return all(
        event in predictions
        for event, *predictions in zip(
            _comparable(other.events),
            _comparable(at_distance.events),
            _comparable(at_place.events),
            strict=True,
        )
    )


def is_same(one: RankSequence, other: RankSequence) -> bool:
    """Check whether two runs of a rank did the same."""
    return _facts(one) == _facts(other) and _comparable(one.events) == _comparable(other.events)


class _NotAMember(Exception):
    """The rank is not in a group in which the other one calls a collective."""


class _MovedSequence:
    """A sequence, moved to another rank."""

    def __init__(
        self, like: RankSequence, rank: int, names: Names, fixed: frozenset[int] | None
    ) -> None:
        self._like = like
        self._rank = rank
        self._names = names
        self._fixed = fixed
        # moved once, by id of the original: events that share a channel or arguments still do
        self._channels: dict[int, Channel] = {}
        self._args: dict[tuple[int, int], CollectiveArgs] = {}
        self._new_names: dict[str, str] = {}  # of groups, by their names on the other rank
        self._made_by_all = {
            dimension_of(event.call.channel.group.ranks)
            for event in like.events
            if isinstance(event, Setup) and like.rank not in event.call.channel.group.ranks
        }
        """Dimensions of which every rank makes all groups, also those that it is not in."""

    def events(self) -> list[Event]:
        return [self._event(event) for event in self._like.events]

    def _event(self, event: Event) -> Event:
        if isinstance(event, Issue):
            return Issue(self._op(event.op))
        if isinstance(event, Setup):
            dimension = dimension_of(event.call.channel.group.ranks)
            return event if dimension in self._made_by_all else Setup(self._op(event.call))
        if isinstance(event, Leave):
            return Leave(self._new_names.get(event.group, event.group))
        return event

    def _op(self, op: Collective) -> Collective:
        channel = self._channel(op.channel)
        if channel is op.channel and op.peer is None:
            return op
        return msgspec.structs.replace(
            op, channel=channel, args=self._moved_args(op, channel), peer=self._peer(op, channel)
        )

    def _channel(self, channel: Channel) -> Channel:
        moved = self._channels.get(id(channel))
        if moved is None:
            moved = self._channels[id(channel)] = self._moved_channel(channel)
        return moved

    def _moved_channel(self, channel: Channel) -> Channel:
        """Return the channel of the rank's own group along the same dimension, which has the name
        that was given to it at the same turn.
        """
        group = channel.group
        dimension = dimension_of(group.ranks)
        if self._rank in group.ranks or self._like.rank not in group.ranks:
            return channel
        if dimension is None:
            raise _NotAMember
        ranks = dimension.ranks(self._rank)
        names_there = self._names.get((group.incarnation, group.ranks), ())
        turn = names_there.index(group.name) if group.name in names_there else 0
        names_here = self._names.get((group.incarnation, ranks), ())
        name = names_here[turn] if turn < len(names_here) else group.name
        self._new_names[group.name] = name
        return Channel(
            msgspec.structs.replace(group, ranks=ranks, name=name),
            channel.device,
            channel.runs_ahead,
        )

    def _moved_args(self, op: Collective, channel: Channel) -> CollectiveArgs:
        root = op.args.root
        if root is None or channel is op.channel:
            return op.args
        key = id(op.args), id(channel)
        if key not in self._args:
            place = op.channel.group.ranks.index(root)
            self._args[key] = msgspec.structs.replace(op.args, root=channel.group.ranks[place])
        return self._args[key]

    def _peer(self, op: Collective, channel: Channel) -> int | None:
        ranks = channel.group.ranks
        if op.peer is None or op.peer not in op.channel.group.ranks:
            return op.peer
        place = _place(op, op.peer)
        if self._fixed is not None and op.index not in self._fixed:
            distance = place - _place(op, self._like.rank)
            place = (ranks.index(self._rank) + distance) % len(ranks)
        return ranks[place]


def _place(op: Collective, rank: int) -> int:
    return op.channel.group.ranks.index(rank)


def _call(event: Event) -> Collective | None:
    if isinstance(event, Issue):
        return event.op
    return event.call if isinstance(event, Setup) else None


def _facts(sequence: RankSequence) -> tuple[object, ...]:
    """Return the facts of a sequence that other ranks may notice, besides its events."""
    return (
        sequence.end,
        sequence.exit_code,
        sequence.exception,
        sequence.left,
        sequence.cut_off,
        sequence.problem,
        [(guess.what, guess.after) for guess in sequence.guesses],
    )


def _comparable(events: Iterable[Event]) -> list[object]:
    """Return events without the details that differ from run to run."""
    threads: dict[int, int] = {}
    found: list[object] = []
    for event in events:
        op = _call(event)
        if op is not None:
            thread = threads.setdefault(op.issue_thread, len(threads))
            found.append(
                (
                    type(event),
                    op.channel.key,
                    op.sequence_number,
                    op.args,
                    op.peer,
                    op.tag,
                    op.coalescing_id,
                    op.coalesced_members,
                    thread,
                )
            )
        elif isinstance(event, ThreadWait):
            found.append((event.index, threads.setdefault(event.thread, len(threads))))
        elif isinstance(event, Leave):
            found.append(event.group)
        elif isinstance(event, StoreCall):
            found.append((event.call.op, event.keys))
    return found
