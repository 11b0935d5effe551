"""One rank's record of a collective, with its arguments, process group, channel and stack.

When 4 ranks meet in one all_reduce, there are four records of it, with the same channel and
sequence number, and each with its own times, stack and state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from itertools import islice
from typing import Annotated

import msgspec

from commlens.model.frames import FrameKind as FrameKind
from commlens.model.nccl import NcclOp
from commlens.model.ops import LIBRARIES, POINT_TO_POINT, key_kind


class State(str, Enum):
    """The state of a collective, as far as its rank could know."""

    ANNOUNCED = "announced"  # recorded, not yet passed to the backend (a verifier may hold it back)
    ISSUED = "issued"  # in the backend or enqueued there; not known to be done
    COMPLETED = "completed"
    FAILED = "failed"  # raised, or its Work carries an exception
    UNKNOWN = "unknown"  # issued, and completion cannot be observed in this process


class LearnedHow(str, Enum):
    """The signal that revealed the end of a collective, or that a device has not ended it."""

    NOT_YET = "not-yet"
    RETURN = "return"  # the op blocks or returns no Work, so its return is its end
    WAIT = "wait"  # a thread's wait ended
    POLL = "poll"  # Work.is_completed()
    NATIVE_RECORDER = "native-recorder"  # torch's own recorder, of what runs on a device
    UNKNOWN = "unknown"
    # in flight: torch's own recorder knows that the device has not started it
    ENQUEUED = "enqueued"
    STARTED = "started"  # in flight: torch's own recorder knows that the device has started it


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack."""

    file: str
    line: int
    function: str
    kind: FrameKind = FrameKind.USER

    @property
    def where(self) -> str:
        """``"train.py:57"``: file name without folder, and line."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


Stack = tuple[Frame, ...]
"""Frames, innermost first."""

_CALL_LINES = 3


def user_frame(stack: Stack) -> Frame | None:
    """Return the innermost frame of the user's code, else of an installed library, else None."""
    by_kind = {frame.kind: frame for frame in reversed(stack)}
    return by_kind.get(FrameKind.USER) or by_kind.get(FrameKind.LIBRARY)


def user_lines(stack: Stack) -> Iterator[Frame]:
    """Yield the frames of the user's code, innermost first."""
    return (frame for frame in stack if frame.kind is FrameKind.USER)


class TensorSpec(msgspec.Struct, frozen=True):
    """The properties of a tensor that matter on the wire. Its data is never read."""

    shape: tuple[int, ...]
    dtype: str  # "float32"
    device: str = "cpu"  # type only: "cpu", "cuda"
    layout: str = "strided"
    # dimensions from slowest to fastest; None: dense and row-major
    memory_order: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class CollectiveArgs(msgspec.Struct, frozen=True):
    """The arguments of a collective: values that must agree across ranks, or correspond."""

    op: str  # the wire op: "all_reduce"
    dispatcher_op: str  # "allreduce_"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    reduce_op: str | None = None  # "SUM", ...; None if the op has none or it is unknown
    root: int | None = None  # global rank
    input_splits: tuple[int, ...] = ()  # all_to_all; empty: even
    output_splits: tuple[int, ...] = ()
    asynchronous: bool | None = None  # None if torch does not say

    @property
    def payload(self) -> tuple[TensorSpec, ...]:
        """The tensors that every rank has: its contribution or, if only the root contributes, its
        share.
        """
        if self.op == "scatter":
            return self.outputs or self.inputs[:1]
        return self.inputs or self.outputs


_Member = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class HandMade(msgspec.Struct, frozen=True):
    """The facts by which one process knows a group that the program made by hand, past
    ``init_process_group`` and ``new_group``: nothing maps its members to global ranks.
    """

    member: _Member  # the process's rank in the group
    size: _Size
    store: str = ""  # "localhost:29600/weight_sync": its address or path, and its prefixes
    ordinal: _Member = 0  # groups of this size that the process had made with this store before


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group as recorded by one rank."""

    name: str  # torch's own: "0", "1", ...; unique among the groups of one incarnation
    # global, by rank in the group; empty: not known (see ``hand_made``)
    ranks: tuple[int, ...]
    description: str = ""  # "default_pg", "mesh_dp", or the user's
    backend: str = ""  # of the channel's device type: "gloo", "nccl"
    mesh_dim: str | None = None  # "dp", if the group is a dimension of a DeviceMesh
    incarnation: int = 0  # number of default groups that the process had created before
    # all its ranks, if ``ranks`` are those that are examined; empty: ``ranks`` are all
    whole: tuple[int, ...] = ()
    hand_made: HandMade | None = None  # of a group that torch did not make
    # of a call of ``new_group`` in which all ranks of the default group meet: those of the group
    members: tuple[int, ...] = ()

    @property
    def asked_for(self) -> tuple[int, ...]:
        """The ranks for which a call makes a group."""
        return self.members or self.all_ranks

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All global ranks of the group, also those that are not examined."""
        return self.whole or self.ranks

    @property
    def kind(self) -> str:
        """The name; of a group made by hand, without numbers: a program that makes its group again
        gives the store's prefix another number.
        """
        return key_kind(self.name) if "/" in self.name else self.name

    @property
    def label(self) -> str:
        """The name in reports: the mesh dimension, else the description, else torch's name."""
        return self.mesh_dim or self.description or self.name


class ChannelKey(tuple[int, str, tuple[int, ...], str]):
    """The identity of a channel across ranks: incarnation, group name, global ranks, device type.

    The hash is cached, since a group may have thousands of ranks.
    """

    _hash: int

    def __hash__(self) -> int:
        """Same as for tuples."""
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash

    def __eq__(self, other: object) -> bool:
        """Same as for tuples, but fast for the same object, the usual case."""
        return self is other or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        """Same as for tuples."""
        return not self == other


SETUP = "setup"
"""The device type of the channels on which process groups are made: one for each call of
``init_process_group`` and ``new_group``.
"""


STORE = "store"
"""The device type of a key in the job's store, which is the name of the "group": its ranks are all
that may wait for it.
"""

QUEUE = "message queue"
"""The device type of a message queue, whose members are its writer and its readers: it is here at
the newest message that it reads, and the writer waits for the message that must be read first.
"""


UNMADE_STORE = "store in its constructor"
"""The same of a store that waits for its server or its clients; its address is the name."""


BY_PLUGIN = "plugin"
"""The completion of the channels of communicators that torch did not make: NCCL's plugin tells it,
from the level kernels on.
"""

NCCL_STORE = "nccl:"
"""The prefix of the "store" of such a communicator's group, before its hash."""

PAST_TORCH = "NCCL past torch"
"""The library that such a channel is of."""


class Channel(msgspec.Struct, frozen=True, dict=True, weakref=True):
    """A process group on one device type, the scope of sequence numbers. ``cpu:gloo,cuda:nccl`` has
    two channels.
    """

    group: ProcessGroup
    device: str  # "cpu", "cuda"
    runs_ahead: bool = False  # a call only enqueues the op on a device, which may run it much later
    # how it is learned what completed, as commlens.tap.backends says; "" if that is not recorded
    completion: str = ""

    @property
    def library(self) -> str | None:
        """The library whose calls past the dispatcher it holds; None of collectives of torch."""
        by_plugin = PAST_TORCH if self.completion == BY_PLUGIN else None
        return self.device if self.device in LIBRARIES else by_plugin

    @cached_property
    def key(self) -> ChannelKey:
        """The identity of the channel across ranks."""
        return ChannelKey((self.group.incarnation, self.group.name, self.group.ranks, self.device))


class Collective(msgspec.Struct, gc=False):
    """One rank's record of a collective or point-to-point op. Times are Unix ns; 0 if it has not
    happened or is unknown.
    """

    index: int  # 1, 2, ... over all ops of the rank
    channel: Channel
    # from 1; per channel, and per (channel, peer, direction) for point-to-point
    sequence_number: int
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
    wait_thread: int = 0  # native thread id; 0 if no thread was seen waiting
    peer: int | None = None  # global rank, point-to-point only; None for a recv from any source
    tag: int = 0
    step: int = 0  # optimizer steps that the process had completed
    coalescing_id: int = 0  # shared by the members of a coalesced group; 0 if not coalesced
    coalesced_members: int = 0  # number of members, on the record that closes a coalesced group
    duration_ns: int | None = None  # on the device; only with the setting timing
    error: str | None = None  # text of the exception
    # another thread issued on the same channel at the same time, so the order is uncertain
    concurrent: bool = False
    # label of the issuing library region, if known ("FSDP::all_gather (layers.0)")
    module: str | None = None
    captured: bool = False  # into a CUDA graph, so it did not run
    # of a receive from any source that has completed: the rank whose message it took
    took_from: int | None = None
    # what NCCL told of it: several for a batch; empty if its plugin is off
    nccl: tuple[NcclOp, ...] = ()

    @property
    def op(self) -> str:
        """The wire op."""
        return self.args.op

    @property
    def is_point_to_point(self) -> bool:
        """Whether it is a send or a receive."""
        return self.args.op in POINT_TO_POINT

    @property
    def is_setup(self) -> bool:
        """Whether it is a call that makes a process group, not a collective."""
        return self.channel.device == SETUP

    @property
    def is_store_wait(self) -> bool:
        """Whether it is a wait for a key in a store, or for one to be made, not a collective."""
        return self.is_for_key or self.is_for_store

    @property
    def is_for_key(self) -> bool:
        """Whether it is a wait for a key in a store."""
        return self.channel.device == STORE

    @property
    def is_for_store(self) -> bool:
        """Whether it is a wait in the constructor of a store, for its server or its clients."""
        return self.channel.device == UNMADE_STORE

    @property
    def in_flight(self) -> bool:
        """Whether it is announced or issued and not known to have ended. ``unknown`` is not in
        flight.
        """
        return self.state in (State.ANNOUNCED, State.ISSUED)

    @property
    def ended_ns(self) -> int:
        """When it ended, as exactly as that is known; 0 if it is in flight or the time is
        unknown.
        """
        if self.in_flight:
            return 0
        return self.done_ns or self.wait_ended_ns or self.returned_ns

    @property
    def waited_for(self) -> bool:
        """Whether a thread is blocked on it."""
        return self.wait_began_ns != 0 and self.wait_ended_ns == 0 and self.in_flight

    @property
    def source(self) -> Frame | None:
        """The user's line that issued it."""
        return user_frame(self.stack)

    @property
    def call_lines(self) -> tuple[tuple[str, int], ...]:
        """The user's innermost lines: they tell apart the calls of a helper that issues it."""
        lines = [(frame.file, frame.line) for frame in islice(user_lines(self.stack), _CALL_LINES)]
        source = self.source if not lines else None
        return tuple(lines) if source is None else ((source.file, source.line),)
