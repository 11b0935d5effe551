"""The side table of a black box: groups, arguments, stacks and texts that records refer to by their
position, as JSON objects (*blobs*) of fixed shapes. The field ``k`` names the shape::

    {"k": "group", "name": "0", "ranks": "0-7", "backend": "nccl", "device": "cuda"}
    {"k": "asked", "op": "all_reduce", "in": [[[1024], "float32", "cuda:0"]], "rop": "SUM"}
"""

from __future__ import annotations

import weakref
from typing import Annotated, Final, TypeVar

import msgspec

from commlens.blackbox import layout as L
from commlens.blackbox.header import INT_MAX
from commlens.model.collective import (
    SETUP,
    STORE,
    UNMADE_STORE,
    Channel,
    CollectiveArgs,
    HandMade,
    ProcessGroup,
    TensorSpec,
)
from commlens.model.hazard import Access, HazardKind, Operand
from commlens.model.ops import STORE_CLIENT, STORE_SERVER
from commlens.model.ranklog import AdapterState
from commlens.model.refusal import Refusal
from commlens.text import clean_json, parse_ranks

_Natural = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]
_Line = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]


class FrameJson(msgspec.Struct, array_like=True, frozen=True):
    """``["/home/me/train.py", 57, "load_batch"]``."""

    file: str
    line: _Line | None
    function: str
    native: str | None = None  # "n": a C++ frame


class TensorJson(msgspec.Struct, array_like=True, frozen=True):
    """``[[5, 5], "float32", "cpu", "strided", null]``."""

    shape: tuple[_Natural, ...]
    dtype: str
    device: str = "cpu"
    layout: str = "strided"
    order: tuple[_Natural, ...] | None = None


class GroupJson(msgspec.Struct, frozen=True, tag_field="k", tag="group"):
    """A process group on one device type."""

    name: str
    ranks: str
    desc: str | None = None
    backend: str | None = None
    device: str | None = None
    mesh_dim: str | None = None
    inc: _Natural = 0
    ahead: bool | None = None  # null in boxes of earlier versions
    completion: str = ""
    hand: HandMade | None = None


class ArgsJson(msgspec.Struct, frozen=True, tag_field="k", tag="asked"):
    """The arguments of a collective."""

    op: str
    dop: str | None = None
    inputs: tuple[TensorJson, ...] = msgspec.field(default=(), name="in")
    outputs: tuple[TensorJson, ...] = msgspec.field(default=(), name="out")
    rop: str | None = None
    root: _Natural | None = None
    input_splits: tuple[_Natural, ...] | None = msgspec.field(default=None, name="is")
    output_splits: tuple[_Natural, ...] | None = msgspec.field(default=None, name="os")
    asynchronous: bool | None = msgspec.field(default=None, name="async")


class StackJson(msgspec.Struct, frozen=True, tag_field="k", tag="stack"):
    """A stack."""

    f: tuple[FrameJson, ...]


class ExceptionJson(msgspec.Struct, frozen=True, tag_field="k", tag="exception"):
    """An exception, and the stack where it was raised."""

    text: str
    f: tuple[FrameJson, ...] = ()
    assertion: str = ""  # that failed in a kernel: "Indexing.cu:16, gather_kernel: ind < size"
    refusal: Refusal | None = None


class TextJson(msgspec.Struct, frozen=True, tag_field="k", tag="text"):
    """A label or an error."""

    text: str


class AdaptersJson(msgspec.Struct, frozen=True, tag_field="k", tag="adapters"):
    """The libraries that communicate past torch's dispatcher, and whether their calls fit."""

    found: dict[str, AdapterState]


class QueueJson(msgspec.Struct, frozen=True):
    """One end of a message queue: member 0 writes, the others read every message."""

    hand: HandMade
    op: str = ""  # the call under way
    done: _Natural = 0  # messages that the process has written or read
    holds: _Natural = 0  # messages
    since: _Natural = 0  # CLOCK_MONOTONIC ns, of the call
    thread: _Natural = 0
    stack: _Natural = 0


class QueuesJson(msgspec.Struct, frozen=True, tag_field="k", tag="queues"):
    """The ends of message queues of a process."""

    found: tuple[QueueJson, ...]


class TouchJson(msgspec.Struct, frozen=True):
    """An op on a tensor of a collective in flight, and its stack's blob."""

    op: str
    access: Access
    operand: Operand
    tensor: str
    stack: _Natural = 0


class HazardJson(msgspec.Struct, frozen=True):
    """A latent fault: its kind, how often, and the stack's blob."""

    what: HazardKind
    times: _Natural = 1
    stack: _Natural = 0
    group: str = ""
    touch: TouchJson | None = None


class HazardsJson(msgspec.Struct, frozen=True, tag_field="k", tag="hazards"):
    """The latent faults that a process found at its end."""

    found: tuple[HazardJson, ...]


class SetupJson(msgspec.Struct, frozen=True, tag_field="k", tag="setup"):
    """A call that makes a process group, or one of a store: then its name is the key."""

    op: str
    name: str
    ranks: str
    desc: str = ""
    backend: str = ""
    label: str | None = None
    inc: _Natural = 0
    number: _Natural = 1
    stack: _Natural = 0
    thread: _Natural = 0
    began: _Natural = 0  # CLOCK_MONOTONIC ns
    prev: _Natural = 0  # the blob of the call before
    hand: HandMade | None = None
    of: str = ""  # the group's ranks, where others meet them in the call


class ThreadJson(msgspec.Struct, frozen=True):
    """A thread and its stack."""

    tid: _Natural = 0
    name: str = ""
    main: bool = False
    locked_out: bool = False
    in_lock: bool = False
    f: tuple[FrameJson, ...] = ()


class EvidenceJson(msgspec.Struct, frozen=True):
    """The payload of an evidence slot."""

    threads: tuple[ThreadJson, ...] = ()


BlobJson = (
    GroupJson
    | ArgsJson
    | StackJson
    | ExceptionJson
    | TextJson
    | HazardsJson
    | SetupJson
    | AdaptersJson
    | QueuesJson
)
_Kind = TypeVar(
    "_Kind",
    GroupJson,
    ArgsJson,
    StackJson,
    ExceptionJson,
    TextJson,
    HazardsJson,
    SetupJson,
    AdaptersJson,
    QueuesJson,
)

_decode_blob: Final = msgspec.json.Decoder(BlobJson).decode
_decode_evidence: Final = msgspec.json.Decoder(EvidenceJson).decode


def decode_blob(payload: bytes) -> BlobJson | None:
    """Decode and check a blob's payload; None if it is not a blob of this version."""
    try:
        blob: BlobJson = _decode_blob(clean_json(payload))
    except (ValueError, RecursionError):  # msgspec's errors and UnicodeDecodeError are ValueErrors
        return None
    return blob


def decode_evidence(payload: bytes) -> EvidenceJson:
    """Decode and check the payload of an evidence slot.

    Raises:
        ValueError: it is not one of this version.
    """
    return _decode_evidence(clean_json(payload))


def decode_args(blob: ArgsJson, reduce_code: int) -> CollectiveArgs:
    """Return the arguments, with the reduce op that the watchdog thread recorded later (code + 1;
    0: none).
    """
    return CollectiveArgs(
        op=blob.op,
        dispatcher_op=blob.dop or blob.op,
        inputs=tuple(_tensor(spec) for spec in blob.inputs),
        outputs=tuple(_tensor(spec) for spec in blob.outputs),
        reduce_op=blob.rop or L.reduce_op_of(reduce_code),
        root=blob.root,
        input_splits=blob.input_splits or (),
        output_splits=blob.output_splits or (),
        asynchronous=blob.asynchronous,
    )


def _tensor(spec: TensorJson) -> TensorSpec:
    return TensorSpec(spec.shape, spec.dtype, spec.device, spec.layout, spec.order)


_channels: weakref.WeakValueDictionary[tuple[ProcessGroup, str, str, bool, str], Channel] = (
    weakref.WeakValueDictionary()
)
"""One object for all ranks that have a channel: with 10,000 ranks in it, it takes 80 kB, and
comparing two takes 50 us.
"""


def decode_channel(blob: GroupJson, *, limit: int) -> Channel | None:
    """Return the channel of a group blob, or None if it has no members.

    Raises:
        ValueError: its ranks are not a set of ranks, or are more than ``limit``.
    """
    device = blob.device or ""
    group = ProcessGroup(
        blob.name,
        (),
        blob.desc or "",
        blob.backend or "",
        blob.mesh_dim,
        blob.inc,
        hand_made=blob.hand,
    )
    runs_ahead = blob.ahead if blob.ahead is not None else device not in ("", "cpu")
    channel = _channel(group, blob.ranks, device, limit, runs_ahead, blob.completion)
    return channel if channel.group.ranks or channel.group.hand_made else None


def decode_setup(blob: SetupJson, *, limit: int) -> Channel:
    """Return the channel of a call that makes a process group, or that uses the store.

    Raises:
        ValueError: as for :func:`decode_channel`.
    """
    unmade = UNMADE_STORE if blob.op in (STORE_CLIENT, STORE_SERVER) else SETUP
    device = STORE if blob.op.startswith("store.") else unmade
    group = ProcessGroup(
        blob.name, (), blob.desc, blob.backend, None, blob.inc, hand_made=blob.hand
    )
    channel = _channel(group, blob.ranks, device, limit)
    if not blob.of:
        return channel
    members = parse_ranks(blob.of, limit=limit)
    return Channel(msgspec.structs.replace(channel.group, members=members), device)


def _channel(
    group: ProcessGroup,
    ranks: str,
    device: str,
    limit: int,
    runs_ahead: bool = False,
    completion: str = "",
) -> Channel:
    """Return the channel of a group, which has no ranks yet. Those of a group made by hand are not
    known.
    """
    key = (group, ranks, device, runs_ahead, completion)
    found = _channels.get(key)
    if found is None:
        if group.hand_made is None:
            group = msgspec.structs.replace(group, ranks=parse_ranks(ranks, limit=limit))
        found = _channels[key] = Channel(group, device, runs_ahead, completion)
    elif len(found.group.ranks) > limit:
        raise ValueError(f"not a set of ranks: {ranks[:80]!r}")
    return found


class SideTable:
    """A copy of a side table of ``size`` bytes; fewer if the file is cut off. ``head`` is read no
    later than the copy.
    """

    def __init__(self, copy: bytes, size: int, head: int) -> None:
        self._copy = memoryview(copy)
        self._size = size
        self._head = head
        self._blobs: dict[int, BlobJson | None] = {}
        # Blobs do not overlap, so an intact table needs no more checking than its size. A hostile
        # one could demand 64 KiB for each of 65,000 records.
        self._budget = 2 * size

    def blob(self, position: int, kind: type[_Kind]) -> _Kind | None:
        """Return the blob at a position if it is alive, intact and of this kind."""
        if position not in self._blobs:
            self._blobs[position] = self._fetch(position)
        found = self._blobs[position]
        return found if isinstance(found, kind) else None

    def _fetch(self, position: int) -> BlobJson | None:
        if position <= max(0, self._head - self._size) or (position - 1) % L.BLOB_ALIGN:
            return None  # none, overwritten or invalid
        at = (position - 1) % self._size
        if at + L.BLOB.size > len(self._copy):
            return None
        length, crc, own_position = L.BLOB.unpack_from(self._copy, at)
        start = at + L.BLOB.size
        if (
            own_position != position
            or length > L.BLOB_MAX
            or start + length > len(self._copy)
            or length > self._budget
        ):
            return None  # damaged, or overwritten after the head was copied
        self._budget -= length
        payload = bytes(self._copy[start : start + length])
        if crc != L.blob_crc(position, payload):
            return None
        return decode_blob(payload)
