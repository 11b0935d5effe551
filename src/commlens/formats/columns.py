"""One rank's operations as columns: what every reader of other tools' dumps makes, and what diagnosis works on.

A dump of 2,000 operations becomes a handful of arrays and a few dozen interned objects, so that thousands of ranks can be
aligned without an object for each operation. :meth:`RankColumns.log` makes objects of the few around a fault.

Imports numpy, so it is imported only where dumps are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commlens.model.collective import Channel, Collective, CollectiveArgs, Frame, FrameKind, LearnedHow, Stack, State
from commlens.model.frames import frame_kind
from commlens.model.ranklog import Observation, RankLog

__all__ = ["COMPLETED", "DTYPES", "RETIRED", "SCHEDULED", "STARTED", "RankColumns", "StackTable", "Status", "stack_of"]

SCHEDULED: Final = 0
"""``state``: enqueued; nothing says that it started. With timing switched off nothing ever says so."""
STARTED: Final = 1
COMPLETED: Final = 2
RETIRED: Final = 3
"""``state``: the recorder let go of it and does not say why: it completed, or it failed or timed out."""

_STATES: Final = (State.ISSUED, State.ISSUED, State.COMPLETED, State.UNKNOWN)

Status = tuple[int, int, int]
"""Last enqueued, started and completed sequence of a process group; -1 where none."""

Integers = npt.NDArray[Any]
Flags = npt.NDArray[Any]


class StackTable(Sequence[Stack]):
    """Stacks that are made into frames only when somebody looks at one.

    Args:
        frames: file, line and function of each different frame.
        stacks: for each different stack, its frames' places in ``frames``, innermost first; as bytes, 32-bit integers.
    """

    def __init__(self, frames: Sequence[tuple[str, int, str]] = (), stacks: Sequence[bytes] = ()) -> None:
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
        return tuple([_made_frame(*frames[place]) for place in memoryview(self._stacks[index]).cast("i")])


def stack_of(frames: Sequence[tuple[str, int, str]]) -> Stack:
    """A stack of files, lines and functions."""
    return tuple([_made_frame(*frame) for frame in frames])


@lru_cache(maxsize=16384)
def _made_frame(file: str, line: int, function: str) -> Frame:
    """The ranks of a job share their code."""
    return Frame(file, line, function, _kind_of(file))


@lru_cache(maxsize=4096)
def _kind_of(file: str) -> FrameKind:
    if file in ("", "??") or file.endswith((".cpp", ".cc", ".h", ".hpp", ".cu", ".so")) or ".so." in file:
        return FrameKind.NATIVE
    if file.startswith("<frozen"):
        return FrameKind.PYTHON
    if "/torch/" in file and any(
        part in file for part in ("/torch/distributed/", "/torch/nn/", "/torch/utils/", "/torch/_", "/torch/optim/")
    ):
        return FrameKind.TORCH  # a torch built in its own source tree is in no site-packages
    return frame_kind(file, [])


DTYPES: Final = {
    "channel": "int32", "args_index": "int32", "stack": "int32", "sequence": "int64", "record_id": "int64", "op_id": "int64",
    "state": "uint8", "retired": "bool", "p2p": "bool", "peer": "int32", "created_ns": "int64", "started_ns": "int64",
    "completed_ns": "int64", "duration_ns": "int64", "timeout_ms": "int64", "coalesced": "int32", "closes": "bool",
}  # fmt: skip
"""The columns of :class:`RankColumns`, and their types."""


_INT32 = partial(np.zeros, 0, "int32")
_INT64 = partial(np.zeros, 0, "int64")
_UINT8 = partial(np.zeros, 0, "uint8")
_BOOL = partial(np.zeros, 0, np.bool_)


@dataclass(slots=True)
class RankColumns:
    """What one file tells of one rank, oldest operation first. Columns have one value for each operation.

    Sequences are those of the file: of the process group for a collective, of its point-to-point operations for those; on
    NCCL a pair of ranks that is not in a batch counts its own.
    """

    rank: int = -1  # global; -1 where the file does not say
    world_size: int = 0  # 0 where the file does not say
    host: str = ""
    job: str = ""
    source: str = ""  # "dumps/rank_3", "dumps.tar!rank_3"
    origin: str = "flight-recorder"  # "flight-recorder", "gloo-recorder", "torch-log", "commlens"
    version: str = ""  # of the file's format
    captured_ns: int = 0  # Unix ns; 0 where the file does not say
    problems: list[str] = field(default_factory=list)  # what could not be read, in sentences
    possible_ranks: tuple[int, ...] = ()  # members of every group in the file: one of them wrote it; empty when not known
    channels: list[Channel] = field(default_factory=list)
    args: list[CollectiveArgs] = field(default_factory=list)
    stacks: Sequence[Stack] = field(default_factory=StackTable)
    status: dict[str, Status] = field(default_factory=dict)  # by the file's own group id, which other ranks do not share
    status_groups: dict[str, str] = field(default_factory=dict)  # that id: the group's name, where it is known
    groups: list[Channel] = field(default_factory=list)  # all the process groups that the file names, used or not
    troubles: list[str] = field(default_factory=list)  # what went wrong that no row can say, in sentences: nobody is to blame by it
    exception: str = ""  # what a log says that the process died of: the last line of a traceback, a CUDA error
    exception_stack: Stack = ()
    observation: Observation = field(default_factory=Observation)  # what a log says of the process's end

    channel: Integers = field(default_factory=_INT32)  # index into channels
    args_index: Integers = field(default_factory=_INT32)  # index into args
    stack: Integers = field(default_factory=_INT32)  # index into stacks, -1 none
    sequence: Integers = field(default_factory=_INT64)
    record_id: Integers = field(default_factory=_INT64)
    op_id: Integers = field(default_factory=_INT64)
    state: Integers = field(default_factory=_UINT8)
    retired: Flags = field(default_factory=_BOOL)
    p2p: Flags = field(default_factory=_BOOL)
    peer: Integers = field(default_factory=_INT32)  # global rank, -1 none or not known
    created_ns: Integers = field(default_factory=_INT64)
    started_ns: Integers = field(default_factory=_INT64)  # 0 none
    completed_ns: Integers = field(default_factory=_INT64)  # 0 none
    duration_ns: Integers = field(default_factory=_INT64)  # -1 none
    timeout_ms: Integers = field(default_factory=_INT64)
    coalesced: Integers = field(default_factory=_INT32)  # number of its coalesced group in this file, 0 alone
    closes: Flags = field(default_factory=_BOOL)  # the entry that closes a coalesced group

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def issued(self) -> int:
        """How many operations the rank ever recorded, as far as the file knows: a ring forgets its oldest."""
        return max(int(self.record_id.max()) + 1, len(self)) if len(self) else 0

    def set_columns(self, columns: dict[str, Any]) -> None:
        """Take columns by name, each as the type that it is declared with."""
        for name, dtype in DTYPES.items():
            setattr(self, name, np.asarray(columns[name], dtype))

    def in_groups(self, names: Collection[str]) -> RankColumns:
        """Return only the operations of some process groups, given by name, description or mesh dimension."""
        wanted = [not {one.group.name, one.group.description, one.group.label}.isdisjoint(names) for one in self.channels]
        mask = np.array([*wanted, False])[self.channel]
        return replace(self, **{name: getattr(self, name)[mask] for name in DTYPES})

    def log(self, indices: Iterable[int]) -> RankLog:
        """These operations as objects, in a log of the rank."""
        chosen = [int(index) for index in indices]
        members: dict[int, int] = {}
        if any(self.closes[index] for index in chosen):
            numbers, counts = np.unique(self.coalesced[~self.closes], return_counts=True)
            members = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        return RankLog(
            rank=self.rank,
            world_size=self.world_size,
            job=self.job,
            host=self.host,
            collectives=[self._collective(index, members) for index in chosen],
            issued=self.issued,
            captured_ns=self.captured_ns,
            exception=self.exception or None,
            exception_stack=self.exception_stack,
            observation=self.observation,
            initialised=True,
            source=self.source,
            problems=list(self.problems),
            versions={self.origin: self.version} if self.version else {},
        )

    def _collective(self, index: int, members: dict[int, int]) -> Collective:
        created, done, duration = int(self.created_ns[index]), int(self.completed_ns[index]), int(self.duration_ns[index])
        state = _STATES[int(self.state[index])]
        stack, peer = int(self.stack[index]), int(self.peer[index])
        return Collective(
            index=int(self.record_id[index]) + 1,
            channel=self.channels[int(self.channel[index])],
            sequence_number=int(self.sequence[index]),
            args=self.args[int(self.args_index[index])],
            state=state,
            announced_ns=created,
            entered_ns=created,
            done_ns=done,
            learned_how=LearnedHow.NATIVE_RECORDER if state is State.COMPLETED else LearnedHow.NOT_YET,
            stack=self.stacks[stack] if stack >= 0 else (),
            peer=peer if peer >= 0 else None,
            coalescing_id=int(self.coalesced[index]),
            coalesced_members=members.get(int(self.coalesced[index]), 0) if self.closes[index] else 0,
            duration_ns=duration if duration >= 0 else None,
        )
