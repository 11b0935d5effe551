"""The ranks of a job that is seen from outside, sorted by what they do, and the form of a cause
that was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal

import msgspec

from commlens.diagnosis.causes.context import C
from commlens.diagnosis.index.activity import Activity, activity_of
from commlens.diagnosis.index.process_exit import process_exit_of
from commlens.diagnosis.select.worlds import worlds_of
from commlens.model.cause import CollectiveRef, Doubt, GroupRef, Wait
from commlens.model.collective import Frame
from commlens.model.grouping import grouped
from commlens.model.ranklog import End
from commlens.model.worlds import JobWorld, Worlds
from commlens.outside.sample import DEFAULT_GROUP, Call, HostSamples, RankSample

_CANNOT_RUN: Final = ("stopped", "holding-gil")
"""Reasons for which a rank counts as outside of calls, whatever its stack is."""


class SeenJob:
    """The ranks of one job, as samples of each host show them, each in one of five classes. If the
    job has several worlds, ranks are numbers of their processes.

    Of four ranks, three stand in ``all_reduce`` and one in a data loader: ``stuck`` are the three,
    ``outside`` is the one, for which they may wait.
    """

    def __init__(self, hosts: Sequence[HostSamples]) -> None:
        self.worlds, parts = _worlds_on(hosts)
        self.samples: list[RankSample] = []
        self.expected: set[int] = set()  # ranks that the hosts should have
        for world, host in parts:
            self.samples += [_numbered(one, world, self.worlds) for one in host.samples]
            self.expected |= {world.first + rank for rank in host.expected}
        self.samples.sort(key=lambda one: one.rank)
        self.ranks = ranks_of(self.samples)
        self.size = self.worlds.size
        self.window_s = max((host.window_s for host in hosts), default=0.0)
        self.doing: dict[int, Activity] = {
            one.rank: activity_of(one.log, process_exit_of(one.log)) for one in self.samples
        }
        self.gone = sorted(self.expected - set(self.ranks))  # ranks that have no process
        self.outside: list[RankSample] = []  # not in a call that waits for other ranks
        self.stuck: list[RankSample] = []  # in such a call, and not moved between the looks
        self.moving: list[RankSample] = []  # in such calls, and moved
        self.unread: list[RankSample] = []  # without a stack, so they may stand anywhere
        for one in self.samples:
            if one.log.observation.end is End.GONE:
                self.gone.append(one.rank)
            else:
                self._class_of(one).append(one)
        if self.stuck:
            self.outside, self.moving = self._awaited(self.outside), self._awaited(self.moving)

    def _class_of(self, one: RankSample) -> list[RankSample]:
        if self.doing[one.rank].why in _CANNOT_RUN:
            return self.outside
        if not one.stack:
            return self.unread
        if one.call is None:
            return self.outside
        return self.stuck if one.moved is False else self.moving

    def world_of(self, rank: int) -> range:
        """Return the ranks of a rank's world."""
        return next(each.numbers for each in self.worlds.worlds if rank in each.numbers)

    def own_world(self, one: RankSample) -> range | None:
        """Return the ranks of a rank's world if it waits in a call of the whole world."""
        return self.world_of(one.rank) if one.call is not None and one.call.needs_world else None

    def _awaited(self, some: Sequence[RankSample]) -> list[RankSample]:
        """Return the ranks for which stuck ranks may wait. If stuck ranks wait in calls of their
        whole world, that is the ranks of this world; else all that may be in a group with them.
        """
        surely = [one for one in some if self.is_needed(one)]
        return surely or [
            one for one in some if any(self._may_need(stuck, one) for stuck in self.stuck)
        ]

    def is_needed(self, one: RankSample) -> bool:
        """Return whether a stuck rank waits in a call of its whole world, which has this rank."""
        return any(one.rank in (self.own_world(stuck) or ()) for stuck in self.stuck)

    def may_hold_up_all(self, one: RankSample) -> bool:
        """Return whether this one rank may hold up all stuck ranks: one of them surely waits for
        it; or all that do not wait for their whole world may, and there is a sign that it is in a
        group with one of them. A group made by hand need not have all ranks of a world, so that
        both are of one world is no such sign.
        """
        stuck = [each for each in self.stuck if self.own_world(each) is None]
        has_sign = any(
            each.call is None or not each.call.by_hand or one.rank not in self.world_of(each.rank)
            for each in stuck
        )
        return self.is_needed(one) or (
            has_sign and all(self._may_need(each, one) for each in stuck)
        )

    def _may_need(self, stuck: RankSample, one: RankSample) -> bool:
        """Return whether both ranks are of one world, or have connections as members of a group
        have.
        """
        return one.rank in self.world_of(stuck.rank) or (
            one.log.pid in stuck.linked and one.log.host == stuck.log.host
        )

    def waits(self) -> list[Wait]:
        """Return where the ranks wait, as data, the most ranks first."""
        alike = grouped(
            ((one.call, source_of(one), self.world_of(one.rank)), one.rank)
            for one in self.stuck
            if one.call is not None
        )
        waits = [
            Wait(sorted(ranks), collective_of(call), self.group_of(call, ranks[0]), source)
            for (call, source, _), ranks in alike.items()
        ]
        return sorted(waits, key=lambda wait: (-len(wait.ranks), wait.ranks))

    def group_of(self, call: Call, rank: int) -> GroupRef | None:
        """Return the group of a call of a rank; None if its ranks are not known."""
        if call.group != DEFAULT_GROUP:
            return None
        return GroupRef("default_pg", "default_pg", list(self.world_of(rank)))


def _worlds_on(hosts: Sequence[HostSamples]) -> tuple[Worlds, list[tuple[JobWorld, HostSamples]]]:
    """Return the worlds that the hosts have seen, and the world of each host's samples."""
    # hosts with one world each may call the place where it meets by several names
    ranks = [one.rank for host in hosts for one in host.samples]
    if len({host.host for host in hosts}) == len(hosts) and len({*ranks}) == len(ranks):
        one = JobWorld("", 0, _size_of(hosts))
        return Worlds((one,)), [(one, host) for host in hosts]
    parts = grouped((host.world, host) for host in hosts if host.samples)
    logs = [[one.log for host in part for one in host.samples] for part in parts.values()]
    worlds = worlds_of(logs, [*map(_size_of, parts.values())])
    of_key = dict(zip(parts, worlds.worlds, strict=True))
    return worlds, [(of_key[key], host) for key, part in parts.items() for host in part]


def _size_of(hosts: Sequence[HostSamples]) -> int:
    """Return the size of a world."""
    return max(
        (
            each
            for host in hosts
            for each in (host.world_size, *(one.rank + 1 for one in host.samples))
        ),
        default=0,
    )


def _numbered(one: RankSample, world: JobWorld, worlds: Worlds) -> RankSample:
    """Return a sample with numbers in place of ranks. In a group that may reach other worlds, no
    number is known of a peer or a root.
    """
    if not worlds.are_several:
        return one
    call = one.call
    if call is not None:
        known = world.first if call.group == DEFAULT_GROUP else None
        peer, root = (
            None if each is None or known is None else known + each
            for each in (call.peer, call.root)
        )
        call = msgspec.structs.replace(call, peer=peer, root=root)
    log = msgspec.structs.replace(one.log, rank=world.first + one.rank, worlds=worlds)
    return msgspec.structs.replace(one, log=log, call=call)


def ranks_of(samples: Iterable[RankSample]) -> list[int]:
    """Return the ranks, sorted."""
    return sorted(one.rank for one in samples)


def collective_of(call: Call) -> CollectiveRef:
    """Return a call as verdicts name it. Stacks hold no sequence numbers."""
    return CollectiveRef(call.op or "torch.distributed", 0, call.peer)


def source_of(one: RankSample) -> str | None:
    """Return the user's line at which a rank stands."""
    return one.line.where if one.line is not None else None


Seen = Literal[
    "dead",
    "outside",
    "unread",
    "moving",
    "ring",
    "unmet",
    "sides",
    "apart",
    "out-of-round",
    "inside",
]
"""What the samples show.

``dead``: ranks whose launcher started them have no process. ``outside``: ranks are outside of calls
while others wait. ``unread``: the stacks of some ranks are unknown, and all others wait.
``moving``: ranks move on in calls while others wait. ``ring``: messages wait for each other.
``unmet``: the other rank of a message waits in a collective. ``sides``: ranks wait in different
calls. ``apart``: the same, in groups that may have members elsewhere. ``out-of-round``: one of the
ranks that wait at one line is in another round of its loop.
``inside``: all ranks wait at one line.
"""


@dataclass
class Found(Generic[C]):
    """A cause, and the samples that words are made of."""

    seen: Seen
    cause: C
    frame: Frame | None = None  # the line to look at
    # those that stand in one place or call together, the fewest ranks first
    sides: Sequence[Sequence[RankSample]] = ()
    doubt: Doubt | None = None
