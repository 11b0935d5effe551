"""One rank's operations as columns, the result of every reader and the input of diagnosis.

A dump of 2,000 operations becomes a few arrays and a few dozen interned objects, so that thousands
of ranks can be aligned without an object per operation.

Imports numpy, so only code that reads dumps imports this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commlens.model.cause import JobEnding
from commlens.model.collective import Channel, CollectiveArgs, Frame, FrameKind, Stack
from commlens.model.frames import frame_kind
from commlens.model.health import RankPlace
from commlens.model.ranklog import Observation

SCHEDULED: Final = 0
"""``state``: enqueued, and not known to have started, which is never known without timing."""
STATES: Final = ("scheduled", "started", "completed", "retired")
"""The values of ``state`` in words."""
STARTED: Final = 1
COMPLETED: Final = 2
RETIRED: Final = 3
"""``state``: the recorder no longer tracks it, for an unknown reason: it completed, failed or timed
out.
"""

TEXT_LOG: Final = "torch-log"
"""``origin`` of a text log."""

REMARKS: Final = ("broadcast-wait", "ras-behind", "ras-rank", "store-lost", "lagging")
"""vLLM waits for a reader of its broadcast, for so many seconds; NCCL's RAS reports that ranks of a
communicator launched fewer operations than others, the last up to this one, and lists this rank of
it after the number that it launched; this rank does not reach torch's store any more; torch's
desync report names this rank as lagging.
"""


class EndingLine(NamedTuple):
    """A line in which a scheduler, the kernel or a launcher tells why a job or a process ended."""

    ending: JobEnding
    text: str
    xid: int = 0  # the number of an Xid, where it is a GPU's error


Status = tuple[int, int, int]
"""Last enqueued, started and completed sequence number of a process group; -1 if none."""

Integers = npt.NDArray[Any]
Flags = npt.NDArray[Any]


class StackTable(Sequence[Stack]):
    """Stacks whose frames are created on access.

    Args:
        frames: file, line and function of each distinct frame.
        stacks: for each distinct stack, the indices of its frames, innermost first, as native
            32-bit integers.
    """

    def __init__(
        self, frames: Sequence[tuple[str, int, str]] = (), stacks: Sequence[bytes] = ()
    ) -> None:
        self._frames = frames
        self._stacks = stacks

    def __len__(self) -> int:
        return len(self._stacks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._stack(one) for one in range(*index.indices(len(self)))]
        return self._stack(index)

    def __iter__(self) -> Iterator[Stack]:
        return map(self._stack, range(len(self)))

    def _stack(self, index: int) -> Stack:
        frames = self._frames
        return tuple(
            [_interned_frame(*frames[place]) for place in memoryview(self._stacks[index]).cast("i")]
        )


def stack_of(frames: Sequence[tuple[str, int, str]]) -> Stack:
    """Return a stack from files, lines and functions."""
    return tuple([_interned_frame(*frame) for frame in frames])


@lru_cache(maxsize=16384)
def _interned_frame(file: str, line: int, function: str) -> Frame:
    """Return a frame, interned, since the ranks of a job share their code."""
    return Frame(file, line, function, _kind_of(file))


@lru_cache(maxsize=4096)
def _kind_of(file: str) -> FrameKind:
    if (
        file in ("", "??")
        or file.endswith((".cpp", ".cc", ".h", ".hpp", ".cu", ".so"))
        or ".so." in file
    ):
        return FrameKind.NATIVE
    if file.startswith("<frozen"):
        return FrameKind.PYTHON
    if "/torch/" in file and any(
        part in file
        for part in (
            "/torch/distributed/",
            "/torch/nn/",
            "/torch/utils/",
            "/torch/_",
            "/torch/optim/",
        )
    ):
        return FrameKind.TORCH  # a torch that is built in its source tree is not in site-packages
    return frame_kind(file, [])


DTYPES: Final = {
    "channel": "int32",
    "args_index": "int32",
    "stack": "int32",
    "sequence": "int64",
    "record_id": "int64",
    "op_id": "int64",
    "state": "uint8",
    "retired": "bool",
    "p2p": "bool",
    "peer": "int32",
    "created_ns": "int64",
    "started_ns": "int64",
    "completed_ns": "int64",
    "duration_ns": "int64",
    "timeout_ms": "int64",
    "coalesced": "int32",
    "closes": "bool",
}
"""The columns of :class:`RankColumns` and their types."""


_INT32 = partial(np.zeros, 0, "int32")
_INT64 = partial(np.zeros, 0, "int64")
_UINT8 = partial(np.zeros, 0, "uint8")
_BOOL = partial(np.zeros, 0, np.bool_)


@dataclass(slots=True)
class RankColumns:
    """One rank's operations in one file, oldest first. Columns have one value per operation.

    Sequence numbers are the file's: per process group for collectives, and separately for its
    point-to-point operations; NCCL counts per pair of ranks outside batches.
    """

    rank: int = -1  # global; -1 if unknown
    world_size: int = 0  # 0 if unknown
    host: str = ""
    place: RankPlace | None = None  # the parts of its host that it uses
    job: str = ""
    source: str = ""  # "dumps/rank_3", "dumps.tar!rank_3"
    origin: str = "flight-recorder"  # "flight-recorder", "gloo-recorder", "torch-log", "commlens"
    version: str = ""  # of the file format
    captured_ns: int = 0  # Unix ns; 0 if unknown
    # Unix ns when the file was last written, so the dump is not newer; 0 if unknown
    written_ns: int = 0
    problems: list[str] = field(default_factory=list)  # sentences about unreadable parts
    # some could not be read, perhaps the newest: nothing tells what the rank did not issue
    lost_entries: bool = False
    # operations ever recorded, as far as the file shows; a ring buffer drops the oldest
    issued: int = 0
    # ranks in every group of the file, one of which wrote it; empty if unknown
    possible_ranks: tuple[int, ...] = ()
    channels: list[Channel] = field(default_factory=list)
    args: list[CollectiveArgs] = field(default_factory=list)
    stacks: Sequence[Stack] = field(default_factory=StackTable)
    status: dict[str, Status] = field(default_factory=dict)  # by the process-local group id
    # process-local group id: group name, if known
    status_groups: dict[str, str] = field(default_factory=dict)
    # all process groups in the file, used or not
    groups: list[Channel] = field(default_factory=list)
    # sentences about timeouts that cannot be aligned across ranks, so they blame no rank
    timeouts: list[str] = field(default_factory=list)
    # wire op and number of the same, where no group is named
    unplaced: list[tuple[str, int]] = field(default_factory=list)
    # torch's watchdog found that a collective took longer than its timeout, according to a log
    timed_out: bool = False
    # what else a log shows, by REMARKS: kind and number
    remarks: list[tuple[str, int]] = field(default_factory=list)
    # "SIGHUP": what ended the launcher, according to its log; the same for all ranks
    launcher_signal: str = ""
    # lines that tell why the job or a process ended; the same for all ranks
    endings: list[EndingLine] = field(default_factory=list)
    # the launcher raised the exception
    by_launcher: bool = False
    # a log tells of the job as a whole, and not of the rank that may be in its name
    of_job: bool = False
    # seconds for which torch's watchdog thread had made no progress, as its monitor tells in a log
    stuck_watchdog_s: int = 0
    # cause of the process's death in a log: the last line of a traceback, a CUDA error
    exception: str = ""
    exception_stack: Stack = ()
    # the first assertion that failed in a kernel, according to a log
    device_assertion: str = ""
    # how the process ended, according to a log
    observation: Observation = field(default_factory=Observation)

    channel: Integers = field(default_factory=_INT32)  # index into channels
    args_index: Integers = field(default_factory=_INT32)  # index into args
    stack: Integers = field(default_factory=_INT32)  # index into stacks; -1 if none
    sequence: Integers = field(default_factory=_INT64)
    record_id: Integers = field(default_factory=_INT64)
    op_id: Integers = field(default_factory=_INT64)
    state: Integers = field(default_factory=_UINT8)
    retired: Flags = field(default_factory=_BOOL)
    p2p: Flags = field(default_factory=_BOOL)
    peer: Integers = field(default_factory=_INT32)  # global rank; -1 if none or unknown
    created_ns: Integers = field(default_factory=_INT64)
    started_ns: Integers = field(default_factory=_INT64)  # 0 if none
    completed_ns: Integers = field(default_factory=_INT64)  # 0 if none
    duration_ns: Integers = field(default_factory=_INT64)  # -1 if none
    timeout_ms: Integers = field(default_factory=_INT64)
    # number of the coalesced group in this file; 0 if not coalesced
    coalesced: Integers = field(default_factory=_INT32)
    closes: Flags = field(default_factory=_BOOL)  # closes a coalesced group

    def __len__(self) -> int:
        return len(self.sequence)

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
