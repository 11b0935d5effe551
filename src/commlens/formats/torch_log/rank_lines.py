"""The state of a log's reader: what the lines so far say about each rank, its process groups, and
the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from commlens.formats.columns import EndingLine, RankColumns
from commlens.formats.torch_log.lines import NamedGroup, Progress, Timeout
from commlens.formats.torch_log.nccl_lines import Communicator, NcclPlace
from commlens.model.health import RankPlace
from commlens.model.ops import COALESCED, POINT_TO_POINT, watchdog_wire_op
from commlens.model.topology import rail_of

NO_SEQUENCE_OPS = POINT_TO_POINT | {COALESCED}
"""Ops whose log lines contain neither the peer nor the counter of the sequence number."""

FrameLine = tuple[str, int, str]
"""A frame of a stack: file, line, function."""


@dataclass(slots=True)
class GroupLines:
    """A process group of one rank."""

    group: NamedGroup
    progress: Progress | None = None
    # by sequence number: what timed out or failed; None if no line tells more than the number
    uncompleted: dict[int, Timeout | None] = field(default_factory=dict)

    @property
    def timeouts(self) -> dict[int, Timeout]:
        """What timed out or failed, by sequence number, ascending."""
        return {
            number: timeout
            for number, timeout in sorted(self.uncompleted.items())
            if timeout is not None
        }

    @property
    def sends_messages(self) -> bool:
        """Whether messages, which have a counter of their own, are seen to be among its work."""
        timed_out = any(
            watchdog_wire_op(timeout.op) in NO_SEQUENCE_OPS for timeout in self.timeouts.values()
        )
        return timed_out or (
            self.progress is not None and self.progress.enqueued < self.progress.completed
        )


@dataclass(slots=True)
class RankLines:
    """One rank.

    A collective that timed out is in ``unassigned`` until a line names its group, then in that
    group's ``uncompleted``. What no line has assigned at the end goes to ``columns.unplaced``.
    """

    columns: RankColumns  # the result, still without operations
    groups: dict[tuple[str, str], GroupLines] = field(default_factory=dict)
    # by group rank, if the line has one, and sequence number
    unassigned: dict[tuple[int | None, int], Timeout] = field(default_factory=dict)
    # of torch 2.15's backend, which names no collective: group name, milliseconds
    nccl2_timeouts: dict[str, int] = field(default_factory=dict)
    # by sequence number, of whichever group: Unix ns of the first line about it
    times: dict[int, int] = field(default_factory=dict)
    unread: int = 0  # lines of the watchdog whose form is not known
    first_unread: str = ""
    stack: list[FrameLine] = field(
        default_factory=list
    )  # of the failed collective, innermost first
    exception_frames: list[FrameLine] = field(default_factory=list)  # innermost first

    def add_place(self, rank: int, place: NcclPlace) -> None:
        """Add the rank's place, from NCCL's lines."""
        self.columns.host = self.columns.host or place.host
        self.columns.place = RankPlace(
            rank, gpu_index=place.gpu, nic=place.nic, rail=rail_of(place.nic, place.nics)
        )

    @property
    def tells_nothing(self) -> bool:
        """Whether no line says anything about the rank itself."""
        faults = (
            self.unassigned
            or self.nccl2_timeouts
            or self.columns.exception
            or self.columns.stuck_watchdog_s
            or self.unread
        )
        return not faults and not any(
            group.uncompleted or group.progress for group in self.groups.values()
        )


@dataclass(slots=True)
class JobLines:
    """The job as a whole."""

    world_size: int = 0  # 0: unknown
    only_local: bool = False  # a line has a local rank, and no line tells the global one
    is_of_a_job: bool = False  # a line is of a distributed job
    aborted_first: bool = False  # srun began to end the ranks before one of them raised
    launcher_signal: str = ""
    remarks: list[tuple[str, int]] = field(default_factory=list)
    endings: list[EndingLine] = field(default_factory=list)
    # that no process can reach the store: the newest, because each tries again and again
    store_lines: list[EndingLine] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
