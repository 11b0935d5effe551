"""One rank's operations as columns, the result of every reader and the input of diagnosis.

A dump of 2,000 operations becomes a few arrays and a few dozen interned objects, so that thousands
of ranks can be aligned without an object per operation. Two all_reduces of the default group, of
which the second is in flight, are these columns::

    channel = [0, 0]             # channels[0]: the default group of NCCL
    sequence = [1, 2]
    args_index = [0, 0]          # args[0]: all_reduce of float32 [1024]
    state = [COMPLETED, STARTED]

Imports numpy, so only code that reads dumps imports this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import field
from msgspec.structs import replace

from commlens.model.cause import JobEnding
from commlens.model.collective import Channel, CollectiveArgs, Frame, FrameKind, Stack
from commlens.model.frames import frame_kind
from commlens.model.ranklog import End, RankLog

SCHEDULED: Final = 0
"""``state``: enqueued, and not known to have started, which is never known without timing."""
STARTED: Final = 1
COMPLETED: Final = 2
RETIRED: Final = 3
"""``state``: the recorder no longer tracks it, for an unknown reason: it completed, failed or timed
out.
"""
STATES: Final = ("scheduled", "started", "completed", "retired")
"""The values of ``state`` in words."""

TEXT_LOG: Final = "torch-log"
"""``origin`` of a text log."""


class EndingLine(NamedTuple):
    """A line in which a scheduler, the kernel or a launcher says why a job or a process ended."""

    ending: JobEnding
    text: str
    xid: int = 0  # the number of an Xid, where it is a GPU's error
    rank: int = -1  # whose process cannot reach torch's store; -1: the line has no rank
    listens: bool = False  # that process hosts the store, and could not listen for connections
    node: str = ""  # that failed
    before_errors: bool = False  # no rank had raised an exception before, in this log


Status = tuple[int, int, int]
"""Last enqueued, started and completed sequence number of a process group; -1 if none."""

Integers = npt.NDArray[Any]
Flags = npt.NDArray[Any]


def stack_of(frames: Iterable[tuple[str, int, str]]) -> Stack:
    """Return a stack from files, lines and functions."""
    return tuple([_interned_frame(*frame) for frame in frames])


@lru_cache(maxsize=16384)
def _interned_frame(file: str, line: int, function: str) -> Frame:
    """Return a frame, interned, since the ranks of a job share their code."""
    return Frame(file, line, function, _kind_of(file))


_NATIVE_SUFFIXES: Final = (".cpp", ".cc", ".h", ".hpp", ".cu", ".so")
# folders of a torch that is built in its source tree, which is not in site-packages
_IN_TORCH: Final = (
    "/torch/distributed/",
    "/torch/nn/",
    "/torch/utils/",
    "/torch/_",
    "/torch/optim/",
)


@lru_cache(maxsize=4096)
def _kind_of(file: str) -> FrameKind:
    if file in ("", "??") or file.endswith(_NATIVE_SUFFIXES) or ".so." in file:
        return FrameKind.NATIVE
    if file.startswith("<frozen"):
        return FrameKind.PYTHON
    if any(folder in file for folder in _IN_TORCH):
        return FrameKind.TORCH
    return frame_kind(file, [])


DTYPES: Final = {
    "channel": "int32",  # index into channels
    "args_index": "int32",  # index into args
    "stack": "int32",  # index into call_stacks; -1 if none
    "sequence": "int64",
    "record_id": "int64",
    "op_id": "int64",
    "state": "uint8",
    "retired": "bool",
    "p2p": "bool",
    "peer": "int32",  # global rank; -1 if none or unknown
    "created_ns": "int64",
    "started_ns": "int64",  # 0 if none
    "completed_ns": "int64",  # 0 if none
    "duration_ns": "int64",  # -1 if none
    "timeout_ms": "int64",
    "coalesced": "int32",  # number of the coalesced group in this file; 0 if not coalesced
    "closes": "bool",  # closes a coalesced group
}
"""The columns of :class:`RankColumns` and their types."""


def _column(name: str) -> Any:
    """Return the field of a column without values."""
    return field(default_factory=partial(np.zeros, 0, DTYPES[name]))


class RankColumns(RankLog, kw_only=True, eq=False):
    """One rank's log whose operations are columns, oldest first: with one value per operation.

    Sequence numbers are the file's: per process group for collectives, and separately for its
    point-to-point operations; NCCL counts per pair of ranks outside batches.
    """

    rank: int = -1  # global; -1 if unknown
    world_size: int = 0  # 0 if unknown
    origin: str = "flight-recorder"  # "flight-recorder", "gloo-recorder", "torch-log", "commlens"
    version: str = ""  # of the file format
    # Unix ns when the file was last written, so the dump is not newer; 0 if unknown
    written_ns: int = 0
    # some entries could not be read, perhaps the newest: what the rank did not issue is unknown
    lost_entries: bool = False
    # a retired operation may be in flight: its recorder sees what is issued, not what completes
    issued_only: bool = False
    issued_messages: bool = False  # the same is true of messages alone
    # ranks in every group of the file, one of which wrote it; empty if unknown
    possible_ranks: tuple[int, ...] = ()
    channels: list[Channel] = field(default_factory=list)
    args: list[CollectiveArgs] = field(default_factory=list)
    call_stacks: list[Stack] = field(default_factory=list)
    status: dict[str, Status] = field(default_factory=dict)  # by group name
    # all process groups in the file, used or not
    groups: list[Channel] = field(default_factory=list)

    # --- of a text log
    attempt: int = 1  # the number of the attempt that is read, the last one in the log
    # it is of the job as a whole, and not of the rank that may be in its name
    of_job: bool = False
    # by group name: the rank's number in the group, as far as a line has it
    numbers: dict[str, int] = field(default_factory=dict)
    # torch's watchdog found that a collective took longer than its timeout
    timed_out: bool = False
    # sentences about timeouts that cannot be aligned across ranks, so they blame no rank
    timeouts: list[str] = field(default_factory=list)
    # wire op and number of the same, where no group is named
    unplaced: list[tuple[str, int]] = field(default_factory=list)
    # seconds for which torch's watchdog thread had made no progress, as its monitor says
    stuck_watchdog_s: int = 0
    # cause of the process's death: the last line of a traceback, a CUDA error
    exception: str = ""
    by_launcher: bool = False  # the launcher raised the exception
    # the same for all ranks: "SIGHUP", the signal that ended the launcher; the lines that say why
    # the job or a process ended; further facts, each with a number
    launcher_signal: str = ""
    endings: list[EndingLine] = field(default_factory=list)
    # "broadcast-wait": vLLM waits for a reader of its broadcast, for so many seconds. "ras-behind":
    # NCCL's RAS report says that some ranks of a communicator launched fewer operations than the
    # others, the last one with this number; the "ras-rank"s after it are these ranks. "store-lost":
    # this rank does not reach torch's store any more. "lagging": torch's desync report names this
    # rank.
    remarks: list[tuple[str, int]] = field(default_factory=list)

    # --- of a dump that is reduced to what diagnosis needs
    timed: bool = False  # it records when an operation starts on the device
    only_active: bool = False  # it holds no completed operation, though there were some
    unbroken: int = 0  # number of records, if their ids are consecutive; else 0

    # --- the columns, by DTYPES
    channel: Integers = _column("channel")
    args_index: Integers = _column("args_index")
    stack: Integers = _column("stack")
    sequence: Integers = _column("sequence")
    record_id: Integers = _column("record_id")
    op_id: Integers = _column("op_id")
    state: Integers = _column("state")
    retired: Flags = _column("retired")
    p2p: Flags = _column("p2p")
    peer: Integers = _column("peer")
    created_ns: Integers = _column("created_ns")
    started_ns: Integers = _column("started_ns")
    completed_ns: Integers = _column("completed_ns")
    duration_ns: Integers = _column("duration_ns")
    timeout_ms: Integers = _column("timeout_ms")
    coalesced: Integers = _column("coalesced")
    closes: Flags = _column("closes")

    @property
    def is_log(self) -> bool:
        """Whether it is of a text log, which need not have a line about each collective."""
        return self.origin == TEXT_LOG

    @property
    def tells_nothing(self) -> bool:
        """Whether a text log only mentions the rank."""
        facts = (
            len(self)
            or self.status
            or self.timeouts
            or self.exception
            or self.stuck_watchdog_s
            or self.timed_out
        )
        return self.is_log and not facts and self.observation.end is End.UNKNOWN

    @property
    def wrapped(self) -> bool:
        """Whether older operations were overwritten or are unreadable."""
        return self.issued > len(self) or bool(self.problems)

    @property
    def lost_newest(self) -> bool:
        """Whether any entries are unreadable: they are written oldest first, and the newest are the
        first that a cut takes.
        """
        return self.lost_entries

    def __len__(self) -> int:
        return len(self.sequence)

    def stack_at(self, row: int) -> Stack:
        """Return the stack of an operation; empty if there is none."""
        return self.call_stacks[int(self.stack[row])] if self.stack[row] >= 0 else ()

    def set_columns(self, columns: dict[str, Any]) -> None:
        """Set all columns, converted to their declared types."""
        for name, dtype in DTYPES.items():
            setattr(self, name, np.asarray(columns[name], dtype))
        self.issued = max(int(self.record_id.max(initial=-1)) + 1, len(self))

    def in_groups(self, names: Collection[str]) -> RankColumns:
        """Return only the operations of some process groups, given by name, description or mesh
        dimension.
        """
        wanted = [
            not {one.group.name, one.group.description, one.group.label}.isdisjoint(names)
            for one in self.channels
        ]
        mask = np.array([*wanted, False])[self.channel]
        return replace(self, **{name: getattr(self, name)[mask] for name in DTYPES})
