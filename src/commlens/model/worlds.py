"""The worlds of a job: programs with default groups of their own, joined by groups made by hand.

Each process of such a job has one number. The processes of a world have consecutive numbers, in the
order of their ranks. If there is one world, numbers are ranks.
"""

from __future__ import annotations

from typing import Final

import msgspec

from commlens.model.collective import Frame


class JobWorld(msgspec.Struct, frozen=True):
    """One default group, and its processes."""

    name: str
    first: int  # number of its rank 0
    size: int

    @property
    def numbers(self) -> range:
        """The numbers of its processes."""
        return range(self.first, self.first + self.size)


class Outsider(msgspec.Struct, frozen=True):
    """A process without a record: a member that has not come to a group made by hand, or a rank
    beyond the present size of its world.
    """

    number: int  # of the process, if it is presumed; else above the numbers of all worlds
    group: str  # the group's label, or the name of the world
    member: int  # its rank in the group, or in the world
    size: int  # of the group; 0: a rank that its world does not have any more


class NearProcess(msgspec.Struct, frozen=True):
    """A process that is connected with members of a group made by hand, and has no record in their
    job.
    """

    pid: int
    command: str
    numbers: tuple[int, ...]  # of the members that it is connected with
    recorded: bool = False  # as another job
    frame: Frame | None = None  # where it stands


class Worlds(msgspec.Struct, frozen=True):
    """The names of the processes of a job."""

    worlds: tuple[JobWorld, ...] = ()
    outsiders: tuple[Outsider, ...] = ()
    # whose processes are presumed: the members that came have their own ranks in the group
    presumed: tuple[Outsider, ...] = ()
    # on this host, where members of a group are not known; None: not looked for
    near: tuple[NearProcess, ...] | None = None

    @property
    def are_several(self) -> bool:
        """Whether the job has several worlds: then a rank is known only together with its world."""
        return len(self.worlds) > 1

    @property
    def size(self) -> int:
        """The number of processes of all worlds."""
        return sum(world.size for world in self.worlds)

    def __bool__(self) -> bool:
        """Whether numbers differ from ranks."""
        return self.are_several or bool(self.outsiders)


ONE_WORLD: Final = Worlds()
"""Numbers are ranks."""
