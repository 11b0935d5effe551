"""What one rank recorded of one collective, and of the groups that it belongs to."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import msgspec

from commlens.model.ops import POINT_TO_POINT


class State(str, Enum):
    """How far a collective came, as far as the rank could know."""

    ANNOUNCED = "announced"  # recorded, not yet handed to the backend (a verifier may hold it back)
    ISSUED = "issued"  # inside the backend or enqueued there; not known to be done
    COMPLETED = "completed"
    FAILED = "failed"  # raised, or its Work carries an exception
    UNKNOWN = "unknown"  # issued, and nothing here can tell whether it completed


class LearnedHow(str, Enum):
    """What told us that a collective ended."""

    NOT_YET = "not-yet"
    RETURN = "return"  # the op blocks or returns no Work, so that returning says it
    WAIT = "wait"  # a thread's wait on it ended
    POLL = "poll"  # Work.is_completed()
    NATIVE_RECORDER = "native-recorder"  # torch's own recorder, on CUDA
    UNKNOWN = "unknown"


class FrameKind(str, Enum):
    """Whose code a stack frame is. Only the user's are shown; the others are folded."""

    USER = "user"
    LIBRARY = "library"  # an installed package that is not torch: shown where no line of the user's is in the stack
    TORCH = "torch"
    COMMLENS = "commlens"
    PYTHON = "python"
    NATIVE = "native"  # a C++ frame


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack."""

    file: str
    line: int
    function: str
    kind: FrameKind = FrameKind.USER

    @property
    def where(self) -> str:
        """``"train.py:57"``: the file's name without its folder, and the line."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


Stack = tuple[Frame, ...]
"""Frames, innermost first."""


def user_frame(stack: Stack) -> Frame | None:
    """The innermost frame of the user's own code; where there is none, of an installed library; else None."""
    by_kind = {frame.kind: frame for frame in reversed(stack)}
    return by_kind.get(FrameKind.USER) or by_kind.get(FrameKind.LIBRARY)


class TensorSpec(msgspec.Struct, frozen=True):
    """What matters of a tensor on the wire. No data is ever read."""

    shape: tuple[int, ...]
    dtype: str  # "float32"
    device: str = "cpu"  # type only: "cpu", "cuda"
    layout: str = "strided"
    memory_order: tuple[int, ...] | None = None  # dimensions from slowest to fastest; None means row-major and dense

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class CollectiveArgs(msgspec.Struct, frozen=True):
    """What the program asked for: all that ranks must agree on, or must correspond in."""

    op: str  # the wire op: "all_reduce"
    dispatcher_op: str  # "allreduce_"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    reduce_op: str | None = None  # "SUM", ...; None where the op has none or it could not be read
    root: int | None = None  # global rank
    input_splits: tuple[int, ...] = ()  # all_to_all; empty means even
    output_splits: tuple[int, ...] = ()
    asynchronous: bool | None = None  # None where torch does not say

    @property
    def payload(self) -> tuple[TensorSpec, ...]:
        """The tensors that every rank of the collective has: its own contribution, or its share where only the root contributes."""
        if self.op == "scatter":
            return self.outputs or self.inputs[:1]
        return self.inputs or self.outputs


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group as one rank knows it."""

    name: str  # torch's own: "0", "1", ...; unique among the groups of one incarnation
    ranks: tuple[int, ...]  # global
    description: str = ""  # "default_pg", "mesh_dp", what the user gave
    backend: str = ""  # of the channel's device type: "gloo", "nccl"
    mesh_dim: str | None = None  # "dp", where the group is a dimension of a DeviceMesh
    incarnation: int = 0  # how many default groups this process had made before

    @property
    def label(self) -> str:
        """The name to show: the mesh dimension, else the description, else torch's name."""
        return self.mesh_dim or self.description or self.name


class ChannelKey(tuple[int, str, tuple[int, ...], str]):
    """What a channel is called on every rank: incarnation, group name, global ranks, device type.

    Hashed once only, since a group may have thousands of ranks.
    """

    _hash: int

    def __hash__(self) -> int:
        """As any tuple's."""
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash

    def __eq__(self, other: object) -> bool:
        """As any tuple's; most often they are one and the same."""
        return self is other or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        """As any tuple's."""
        return not self == other


class Channel(msgspec.Struct, frozen=True, dict=True):
    """Where sequence numbers live: a group on one device type. ``cpu:gloo,cuda:nccl`` is two channels."""

    group: ProcessGroup
    device: str  # "cpu", "cuda"

    @cached_property
    def key(self) -> ChannelKey:
        """The identity that holds across ranks."""
        return ChannelKey((self.group.incarnation, self.group.name, self.group.ranks, self.device))


class Collective(msgspec.Struct):
    """One collective or point-to-point op of one rank. Times are Unix ns, 0 when it has not happened or is not known."""

    index: int  # 1, 2, ... over everything the rank issued
    channel: Channel
    sequence_number: int  # from 1; per channel, and per (channel, peer, direction) for point-to-point
    args: CollectiveArgs
    state: State
    announced_ns: int
    entered_ns: int = 0
    returned_ns: int = 0
    wait_began_ns: int = 0
    wait_ended_ns: int = 0
    done_ns: int = 0
    learned_how: LearnedHow = LearnedHow.NOT_YET
    stack: Stack = ()
    issue_thread: int = 0  # native thread id
    wait_thread: int = 0  # native thread id; 0 when no thread was seen to wait
    peer: int | None = None  # global rank, point-to-point only; None with recv means any source
    tag: int = 0
    step: int = 0  # optimizer steps that the process had completed
    coalescing_id: int = 0  # members of one coalesced group share it; 0 when alone
    coalesced_members: int = 0  # on the record that closes a coalesced group: how many members it has
    duration_ns: int | None = None  # on the device; only with timing switched on
    error: str | None = None  # text of the exception
    concurrent: bool = False  # another thread issued on the same channel at the same time: order is uncertain
    module: str | None = None  # label of the library region that issued it, where one is known ("FSDP::all_gather (layers.0)")

    @property
    def op(self) -> str:
        """The wire op."""
        return self.args.op

    @property
    def is_point_to_point(self) -> bool:
        """Whether it is a send or a receive."""
        return self.args.op in POINT_TO_POINT

    @property
    def in_flight(self) -> bool:
        """Announced or issued, and not known to have ended. ``unknown`` is not in flight: nobody can say."""
        return self.state in (State.ANNOUNCED, State.ISSUED)

    @property
    def waited_for(self) -> bool:
        """Whether a thread is blocked on it right now."""
        return self.wait_began_ns != 0 and self.wait_ended_ns == 0 and self.in_flight

    @property
    def source(self) -> Frame | None:
        """The user's line that issued it."""
        return user_frame(self.stack)
