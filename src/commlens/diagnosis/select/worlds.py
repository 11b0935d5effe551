"""Find the members of groups that programs made by hand, and join the worlds that meet in them.

A trainer of 4 ranks and a vLLM server of 2 have default groups of their own: two worlds. To send
weights, the trainer's rank 0 and both servers make a group: each calls a function of vLLM with the
store ``localhost:29600``, the size 3 and its own rank in the group. So processes that pass the same
store and size are its members, and none of them knows the global ranks of the others.
:func:`join_worlds` numbers the processes of both worlds, 0 to 3 and 4 to 5, and writes into their
logs that the group is that of 0, 4 and 5.

If one of the members is not known, it is presumed to be the rank of the world that all others show
it to be, or gets a number of its own, beyond all worlds: an outsider.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from commlens.model.collective import NCCL_STORE, QUEUE, Channel, Collective, HandMade, ProcessGroup
from commlens.model.ranklog import RankLog
from commlens.model.store_identity import StoreIdentity, identity_of
from commlens.model.worlds import JobWorld, Outsider, Worlds
from commlens.text import DEFAULT_LABELS

_IN_ALL: Final[dict[str, Any]] = {"job": "joined worlds", "restart": 0, "size_in_environment": None}
"""Fields that the logs of several worlds then have alike: they are one job."""


def join_worlds(runs: Sequence[Sequence[RankLog]]) -> list[RankLog]:
    """Number the processes of one or several worlds, and put these numbers into their logs in place
    of ranks, roots and peers. Logs without groups made by hand are returned as they are.

    Args:
        runs: the logs of each world, one a rank. The order does not matter.
    """
    _forget_unwritten_queues(list(chain.from_iterable(runs)))
    known = [logs for logs in runs if logs]
    runs = sorted(known, key=lambda logs: (_script(logs), logs[0].job, logs[0].restart))
    if len(runs) < 2 and not any(_made_by(log) for logs in runs for log in logs):
        return [log for logs in runs for log in logs]
    sizes = [
        max([*(log.world_size for log in logs), *(log.rank + 1 for log in logs)]) for logs in runs
    ]
    worlds = worlds_of(runs, sizes).worlds
    groups = _Groups(runs, worlds)
    numbered = [
        _numbered(log, world, groups)
        for logs, world in zip(runs, worlds, strict=True)
        for log in logs
    ]
    names = Worlds(worlds, tuple(groups.outsiders), tuple(groups.presumed))
    for log in numbered:
        log.worlds = names
    return numbered


def _forget_unwritten_queues(logs: Sequence[RankLog]) -> None:
    """Drop message queues whose writer, mostly a process that is no rank, has no record: nobody is
    known to wait for their readers.
    """
    ends = [op for log in logs for op in log.setups if op.channel.device == QUEUE]
    made = [op.channel.group.hand_made for op in ends]
    written = {each.store for each in made if each is not None and each.member == 0}
    for log in logs if ends else ():
        log.setups = [
            op
            for op in log.setups
            if op.channel.device != QUEUE
            or (of := op.channel.group.hand_made) is None  # its logs were joined before
            or of.store in written
        ]


def worlds_of(runs: Sequence[Sequence[RankLog]], sizes: Sequence[int]) -> Worlds:
    """Return the names of the processes of worlds with these logs and sizes."""
    worlds, first = [], 0
    for name, size in zip(_names(runs), sizes, strict=True):
        worlds.append(JobWorld(name, first, size))
        first += size
    return Worlds(tuple(worlds))


class _Claim(NamedTuple):
    """A process that says which member of a group it is."""

    member: int  # its rank in the group
    number: int  # of the process, among those of all worlds
    has_ended: bool
    label: str  # of the group


class _Groups:
    """The members of all groups made by hand, by number; and with them, the numbers to write in
    place of ranks.
    """

    def __init__(self, runs: Sequence[Sequence[RankLog]], worlds: Sequence[JobWorld]) -> None:
        self.outsiders: list[Outsider] = []
        self.presumed: list[Outsider] = []
        self.size = worlds[-1].first + worlds[-1].size
        self.has_several_worlds = len(worlds) > 1
        self._worlds = dict(zip(worlds, runs, strict=True))
        self._channels: dict[tuple[Channel, JobWorld, int], Channel] = {}  # made by `channel`
        # by group and the number of a process in it, as processes that claim one place are in
        # different groups: the numbers of the members
        self._ranks: dict[tuple[StoreIdentity, int], tuple[int, ...]] = {}
        # by rank beyond the size of its world: its number
        self._beyond: dict[tuple[JobWorld, int], int] = {}
        claims = self._claims()
        # the processes that wait for such a member themselves: none of them is the missing one
        self._incomplete = {
            claim.number
            for identity, known in claims.items()
            if len(known) < identity.size
            for claim in known
        }
        times = Counter(known[-1].label for known in claims.values())
        # complete groups first: `_world_of` reads from them which ranks a world's groups have
        for identity in sorted(claims, key=lambda each: (len(claims[each]) < each.size, each)):
            label = claims[identity][-1].label
            if times[label] > 1:
                label = identity.store or label
            self._place_members(identity, claims[identity], label)

    def _claims(self) -> dict[StoreIdentity, list[_Claim]]:
        """Return, by group, the processes that say that they are in it."""
        claims: dict[StoreIdentity, list[_Claim]] = defaultdict(list)
        for world, logs in self._worlds.items():
            for log in logs:
                for made, label in _made_by(log).items():
                    identity = identity_of(log, made)
                    number, has_ended = world.first + log.rank, log.observation.has_ended
                    claims[identity].append(_Claim(made.member, number, has_ended, label))
        return claims

    def _place_members(self, identity: StoreIdentity, claims: Sequence[_Claim], label: str) -> None:
        """Set the members of a group for the processes that claim to be in it.

        If two living ones claim one place, or if the group has no store that could be compared,
        these may be several groups: of each, only one member is known. A process that has ended
        may have been started again: the living one has the place.
        """
        living = [claim for claim in claims if not claim.has_ended] or claims
        meet = bool(identity.store) and len({claim.member for claim in living}) == len(living)
        for members in [claims] if meet else [[claim] for claim in claims]:
            ended_first = sorted(members, key=lambda claim: not claim.has_ended)
            known = {claim.member: claim.number for claim in ended_first}
            ranks = self._members(identity, known, label)
            self._ranks |= {(identity, claim.number): ranks for claim in members}

    def _members(
        self, identity: StoreIdentity, known: Mapping[int, int], label: str
    ) -> tuple[int, ...]:
        """Return the numbers of all members of a group, of which some are known. Note the others
        as presumed or outsiders.
        """
        ranks = dict(known)
        missing = [member for member in range(identity.size) if member not in known]
        # all members of a communicator of NCCL have come to it: if one is not known, it is not
        # recorded, so it is none of the world's recorded ranks
        may_come = bool(missing) and not identity.store.startswith(NCCL_STORE)
        world = self._world_of(identity.size, known) if may_come else None
        for member in missing:
            if world is not None and world.first + member not in self._incomplete:
                ranks[member], kind = world.first + member, self.presumed
            else:
                ranks[member], kind = self._next_outsider(), self.outsiders
            kind.append(Outsider(ranks[member], label, member, identity.size))
        return tuple(ranks[member] for member in range(identity.size))

    def _world_of(self, size: int, known: Mapping[int, int]) -> JobWorld | None:
        """Return the world whose ranks make up a group: the group has its size, and those who came
        have their own ranks in it. A single one may be there by chance, unless the world's ranks
        have met in such a group before, or have met nowhere else.
        """
        for world, logs in self._worlds.items():
            if size == world.size and all(
                number == world.first + member for member, number in known.items()
            ):
                met_before = tuple(world.numbers) in self._ranks.values()
                met_nowhere_else = all(
                    op.channel.group.hand_made is not None
                    for log in logs
                    for op in (*log.setups, *log.collectives)
                )
                return world if len(known) > 1 or met_before or met_nowhere_else else None
        return None

    def number(self, world: JobWorld, rank: int) -> int:
        """Return the number of a world's rank. A rank beyond the world's size (the world was made
        again with fewer ranks) gets a number that no process has.
        """
        if rank in range(world.size):
            return world.first + rank
        if (world, rank) not in self._beyond:
            self._beyond[world, rank] = self._next_outsider()
            name = world.name if self.has_several_worlds else "rank"
            self.outsiders.append(Outsider(self._beyond[world, rank], name, rank, 0))
        return self._beyond[world, rank]

    def _next_outsider(self) -> int:
        return self.size + len(self.outsiders)

    def channel(self, log: RankLog, channel: Channel, world: JobWorld) -> Channel:
        """Return a channel with numbers in place of ranks."""
        number, made = world.first + log.rank, channel.group.hand_made
        key = channel, world, number if made is not None else 0
        if key not in self._channels:
            group = channel.group
            if made is None:
                ranks = tuple(self.number(world, rank) for rank in group.ranks)
                whole = tuple(self.number(world, rank) for rank in group.whole)
                members = tuple(self.number(world, rank) for rank in group.members)
                changed = msgspec.structs.replace(group, ranks=ranks, whole=whole, members=members)
            else:
                identity = identity_of(log, made)
                changed = ProcessGroup(
                    (identity.store or group.name)
                    + (f" #{identity.ordinal + 1}" if identity.ordinal else ""),
                    self._ranks.get((identity, number), (number,)),
                    _label(group),
                    group.backend,
                )
            self._channels[key] = msgspec.structs.replace(channel, group=changed)
        return self._channels[key]


def _numbered(log: RankLog, world: JobWorld, groups: _Groups) -> RankLog:
    """Return the log of a process of ``world`` with numbers in place of ranks."""

    def with_numbers(op: Collective) -> Collective:
        channel = groups.channel(log, op.channel, world)
        if channel.group == op.channel.group:
            return op
        of_hand = op.channel.group.hand_made is not None

        def number(rank: int | None) -> int | None:
            if rank is None:
                return None
            if not of_hand:
                return groups.number(world, rank)
            # a call names its peer or root by its place in such a group
            return channel.group.ranks[rank] if 0 <= rank < len(channel.group.ranks) else None

        args = op.args
        if args.root is not None:
            args = msgspec.structs.replace(args, root=number(args.root))
        peer, source = number(op.peer), number(op.took_from)
        return msgspec.structs.replace(op, channel=channel, args=args, peer=peer, took_from=source)

    return msgspec.structs.replace(
        log,
        collectives=[with_numbers(op) for op in log.collectives],
        setups=[with_numbers(op) for op in log.setups],
        keys_written=[with_numbers(op) for op in log.keys_written],
        store_wait=with_numbers(log.store_wait) if log.store_wait is not None else None,
        rank=world.first + log.rank,
        **(_IN_ALL | {"world_size": groups.size} if groups.has_several_worlds else {}),
    )


def _made_by(log: RankLog) -> dict[HandMade, str]:
    """Return the groups made by hand that a process is in, with their labels."""
    groups = (op.channel.group for op in (*log.setups, *log.collectives))
    return {
        made: _label(group)
        for group in chain(groups, log.unused_groups)
        if (made := group.hand_made) is not None and made.member < made.size
    }


def _label(group: ProcessGroup) -> str:
    """Return the name that the program gave a group, else the prefixes of its store."""
    store = group.hand_made.store if group.hand_made is not None else ""
    names = group.label, store.partition("/")[2], store
    return next((name for name in names if name not in DEFAULT_LABELS), "made by hand")


def _names(runs: Sequence[Sequence[RankLog]]) -> list[str]:
    """Return a name for each world: the name in its settings, else the part of its command line
    that the other worlds' lack, else a number. ``train.py`` and ``vllm serve m`` are "train" and
    "vllm"; ``serve.py a`` and ``serve.py b`` are "a" and "b".
    """
    given = [max(log.world for log in logs) for logs in runs]
    commands = [_words(_script(logs)) for logs in runs]
    times = Counter(chain.from_iterable(map(set, commands)))
    differing = [" ".join(word for word in words if times[word] == 1) for words in commands]
    for derived in (["".join(words[:1]) for words in commands], differing):
        names = [name or other for name, other in zip(given, derived, strict=True)]
        if all(names) and len(set(names)) == len(runs):
            return names
    return [f"world {number}" for number in range(1, len(runs) + 1)]


def _script(logs: Sequence[RankLog]) -> str:
    """Return the command line of a world's first process."""
    return min(logs, key=lambda log: log.rank).script


def _words(script: str) -> list[str]:
    """Return the words of a command line, the first without its folder and suffix."""
    try:
        words = shlex.split(script)
    except ValueError:
        words = script.split()
    return [Path(word).stem for word in words[:1]] + words[1:]
