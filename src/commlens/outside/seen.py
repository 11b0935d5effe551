"""The ranks of a job that is seen from outside, sorted by what they do, and what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal

from commlens.diagnosis.causes.context import C
from commlens.diagnosis.index.activity import Activity, activity_of
from commlens.diagnosis.index.process_exit import process_exit_of
from commlens.model.cause import CollectiveRef, Doubt, GroupRef, Wait
from commlens.model.collective import Frame
from commlens.model.ranklog import End
from commlens.outside.sample import DEFAULT_GROUP, Call, HostSamples, RankSample

_CANNOT_RUN: Final = ("stopped", "holding-gil")
"""Reasons for which a rank counts as outside of calls, whatever its stack is."""


class SeenJob:
    """The ranks of one job, as samples of each host show them."""

    def __init__(self, hosts: Sequence[HostSamples]) -> None:
        samples = (sample for host in hosts for sample in host.samples)
        self.samples = sorted(samples, key=lambda one: one.rank)
        self.ranks = ranks_of(self.samples)
        self.expected = {rank for host in hosts for rank in host.expected}
        self.world = max([host.world_size for host in hosts], default=0)
        if self.ranks:
            self.world = max(self.world, self.ranks[-1] + 1)
        self.window_s = max((host.window_s for host in hosts), default=0.0)
        self.doing: dict[int, Activity] = {
            one.rank: activity_of(one.log, process_exit_of(one.log)) for one in self.samples
        }
        self.absent = sorted(self.expected - set(self.ranks))
        self.unread: list[RankSample] = []  # they may stand anywhere
        self.outside: list[RankSample] = []
        self.stuck: list[RankSample] = []
        self.moving: list[RankSample] = []  # in calls
        for one in self.samples:
            self._sort_in(one)

    def _sort_in(self, one: RankSample) -> None:
        if one.log.observation.end is End.GONE:
            self.absent.append(one.rank)
        elif self.doing[one.rank].why in _CANNOT_RUN:
            self.outside.append(one)
        elif not one.stack:
            self.unread.append(one)
        elif one.call is None:
            self.outside.append(one)
        elif one.moved is False:
            self.stuck.append(one)
        else:
            self.moving.append(one)

    def waits(self) -> list[Wait]:
        """Return where the ranks wait, as data, the most ranks first."""
        alike: dict[tuple[Call, str | None], list[int]] = defaultdict(list)
        for one in self.stuck:
            if one.call is not None:
                alike[one.call, source_of(one)].append(one.rank)
        waits = [
            Wait(sorted(ranks), collective_of(call), self.group_of(call), source)
            for (call, source), ranks in alike.items()
        ]
        return sorted(waits, key=lambda wait: (-len(wait.ranks), wait.ranks))

    def group_of(self, call: Call) -> GroupRef | None:
        """Return the group of a call; None if its ranks are not known."""
        if call.group != DEFAULT_GROUP:
            return None
        return GroupRef("default_pg", "default_pg", list(range(self.world)))


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
    "dead", "absent", "unread", "moving", "ring", "unmet", "sides", "out-of-round", "inside"
]
"""What the samples show.

``dead``: ranks whose launcher started them have no process. ``absent``: ranks are outside of calls
while others wait. ``unread``: the stacks of some ranks are unknown, and all others wait.
``moving``: ranks move on in calls while others wait. ``ring``: messages wait for each other.
``unmet``: the other rank of a message waits in a collective. ``sides``: ranks wait in different
calls. ``out-of-round``: one of the ranks that wait at one line is in another round of its loop.
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
