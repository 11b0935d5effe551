"""Reads the file in which the plugin for NCCL's profiler (``native/_nccl_profiler.c``) notes what
NCCL told it: communicators, their operations, and the operations' network transfers.

The file has a header and three tables of fixed size, whose slots are used again. A slot begins with
a sequence word: its generation, doubled; odd while the slot is written. An operation names its
communicator by slot and generation, so that it is not taken for one of the slot's next
communicator; so does a transfer its operation.

The writer takes no lock and may be killed between any two instructions, and the file may come from
anywhere: everything is checked, in bounded time and memory.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import msgspec

from commlens.blackbox.job_dirs import events_file
from commlens.errors import FormatError
from commlens.model.nccl import NcclCommunicator, NcclOp, NcclRecord, NcclTransfer, TransferState
from commlens.text import printable

MAGIC: Final = b"CLNSNCCL"
FORMAT: Final = 1


class _Layout:
    """A struct of ``_nccl_profiler.c``, with the fields that are read here."""

    def __init__(self, fields: str) -> None:
        """``fields``: of each field its code of :mod:`struct` and its name; of bytes that are
        skipped, the code alone.
        """
        parts = [field.split() for field in fields.split(",")]
        self.struct = struct.Struct("<" + "".join(part[0] for part in parts))
        self.size = self.struct.size
        self._names = [part[1] for part in parts if part[1:]]

    def by_name(self, values: Iterable[Any]) -> Any:
        """Return the values that the struct unpacks as attributes."""
        return SimpleNamespace(**dict(zip(self._names, values, strict=True)))


_HEADER: Final = _Layout(
    "8x, I version, I header_size, I comms, I comm_size, I ops, I op_size, 8x, I transfers,"
    " I transfer_size, Q total_size, I pid, I mask, Q start_ticks, Q created_mono_ns, Q created_ns,"
    " I status, I nccl_version, 40x, 256s library, Q lost_comms, Q lost_ops, Q lost_transfers,"
    " Q for_others, 24x"
)
"""``comms``, ``ops`` and ``transfers`` are the numbers of slots, each of the size that follows.
``mask`` has the kinds of events that NCCL was asked for. ``lost_comms``, ``lost_ops`` and
``lost_transfers`` count those that found no free slot, ``for_others`` the transfers that this
process's proxy thread made for other processes.
"""
_COMM: Final = _Layout(
    "Q seq, Q hash, i size, i rank, i nodes, 4x, Q made_ns, Q closed_ns, Q collectives, Q messages,"
    " Q finished_collectives, 32x, Q nccl_version, 96s name, Q replayed, 40x"
)
_OP: Final = _Layout(
    "Q seq, Q number, 16s func, 16s datatype, Q elements, i root, i peer, Q state, Q nccl_number,"
    " I comm, I comm_generation, I thread, 4x, Q called_ns, Q returned_ns, Q launched_ns,"
    " Q started_ns, Q stopped_ns, Q device_started_ns, Q device_stopped_ns, 8x"
)
_TRANSFER: Final = _Layout(
    "Q seq, I op, I op_generation, 8x, i peer, i steps, I channel, I is_send, Q done, Q states, 8x,"
    " Q moved_ns, Q ended_ns, 16x"
)
_HEADER_SIZE: Final = 4096
SIZE_MAX: Final = 16 << 20
_TABLE_MAX: Final = 1 << 16
_OTHER_NCCL: Final = 2
_KERNEL_CH: Final = 1 << 6
_PROXY_STEP: Final = 1 << 4
_GENERATION: Final = 0xFFFFFF
_CAPTURED, _WITH_KERNELS, _MESSAGE, _REPLAY = 8, 16, 32, 128
_INT_MAX: Final = (1 << 63) - 1
_STATES: Final[Mapping[int, TransferState]] = {
    8: "waits-for-own-gpu",
    9: "in-network",
    10: "waits-for-data",
    11: "flushes",
    12: "waits-for-own-gpu",
    20: "waits-for-peer",
}
"""NCCL's numbers of the states of a step."""


def read_beside(box: Path, pid: int, start_ticks: int, unix_offset: int) -> NcclRecord | None:
    """Return the events that NCCL reported to the process of a black box; None if there is no file.

    Args:
        box: its path.
        pid: of the process.
        start_ticks: of the process.
        unix_offset: from CLOCK_MONOTONIC to Unix time, in ns, as for the times of the box.

    Raises:
        FormatError: there is a file that cannot be read.
    """
    path = events_file(box.parent, pid)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        content = b""
        while piece := os.pread(descriptor, SIZE_MAX - len(content), len(content)):
            content += piece
    except OSError as error:
        raise FormatError(f"{path} could not be read: {error.strerror or error}.") from None
    finally:
        os.close(descriptor)
    record = read_events(content, name=str(path), unix_offset=unix_offset)
    return record if record.start_ticks == start_ticks else None


def read_events(
    content: bytes, *, name: str = "the file of NCCL's events", unix_offset: int | None = None
) -> NcclRecord:
    """Read the content of such a file, live or copied. Without an offset to Unix time, that of the
    file's beginning holds.

    Raises:
        FormatError: it is no such file, of another version, or damaged.
    """
    head = _read_head(content, name)
    offset = head.created_ns - head.created_mono_ns if unix_offset is None else unix_offset
    comms_at = _HEADER_SIZE
    ops_at = comms_at + head.comms * _COMM.size
    transfers_at = ops_at + head.ops * _OP.size

    def unix(monotonic_ns: int) -> int:
        moment = monotonic_ns + offset
        return moment if monotonic_ns and 0 < moment < _INT_MAX else 0

    transfers = _open_transfers(content[transfers_at:], head, unix)
    ops, torn = _ops_by_comm(content[ops_at:transfers_at], unix, transfers)
    found = []
    for index, fields in enumerate(_COMM.struct.iter_unpack(content[comms_at:ops_at])):
        comm = _COMM.by_name(fields)
        if comm.seq and not comm.seq & 1 and 0 <= comm.rank < comm.size:
            found.append(_communicator(comm, ops[index, comm.seq >> 1 & _GENERATION], unix))
    return NcclRecord(
        pid=head.pid,
        start_ticks=min(head.start_ticks, _INT_MAX),
        level=_level(head.mask),
        nccl_version=head.nccl_version if head.nccl_version < 10**6 else 0,
        library=_text(head.library),
        is_other_nccl=head.status == _OTHER_NCCL,
        communicators=tuple(sorted(found, key=lambda comm: (comm.made_ns, comm.hash))),
        lost=min(head.lost_comms + head.lost_ops + head.lost_transfers, _INT_MAX),
        torn=torn,
        for_others=min(head.for_others, _INT_MAX),
    )


def _read_head(content: bytes, name: str) -> Any:
    if len(content) < _HEADER_SIZE or content[:8] != MAGIC:
        cut = MAGIC.startswith(content[:8]) or content[:8] == MAGIC
        raise FormatError(
            f"{name} is cut off within its header: {len(content)} of {_HEADER_SIZE} bytes are left."
            if content and cut
            else f"{name} is not a file of NCCL's events."
        )
    head = _HEADER.by_name(_HEADER.struct.unpack_from(content))
    if head.version != FORMAT:
        raise FormatError(
            f"{name} has NCCL's events in version {head.version}, but this commlens reads version"
            f" {FORMAT}: read it with the commlens that wrote it, unless it is damaged."
        )
    sizes = head.header_size, head.comm_size, head.op_size, head.transfer_size
    tables = (
        head.comms * head.comm_size + head.ops * head.op_size + head.transfers * head.transfer_size
    )
    if (
        sizes != (_HEADER_SIZE, _COMM.size, _OP.size, _TRANSFER.size)
        or max(head.comms, head.ops, head.transfers) > _TABLE_MAX
        or head.total_size != _HEADER_SIZE + tables
        or head.total_size > SIZE_MAX
    ):
        raise FormatError(
            f"{name} has a damaged header: its sizes and offsets contradict each other."
        )
    if len(content) < head.total_size:
        raise FormatError(f"{name} is cut off: {len(content)} of {head.total_size} bytes are left.")
    return head


def _level(mask: int) -> Literal["calls", "kernels", "transfers"]:
    """Return how much NCCL was asked to report."""
    if mask & _PROXY_STEP:
        return "transfers"
    return "kernels" if mask & _KERNEL_CH else "calls"


def _text(padded: bytes) -> str:
    return printable(padded.partition(b"\0")[0].decode("utf-8", "replace"))


def _open_transfers(
    table: bytes, head: Any, unix: Callable[[int], int]
) -> dict[tuple[int, int], list[NcclTransfer]]:
    """Return the transfers that have not ended, by the index and generation of their operation."""
    found: dict[tuple[int, int], list[NcclTransfer]] = defaultdict(list)
    for fields in _TRANSFER.struct.iter_unpack(table[: head.transfers * _TRANSFER.size]):
        if not fields[0] or fields[0] & 1:  # free, or being written
            continue
        each = _TRANSFER.by_name(fields)
        if each.ended_ns or not 0 <= each.steps < 1 << 30:
            continue
        done = min(each.done, each.steps)
        found[each.op, each.op_generation].append(
            NcclTransfer(
                each.peer,
                each.channel & 0xFF,
                bool(each.is_send),
                each.steps,
                done,
                _STATES.get(_oldest_state(each, done), ""),
                unix(each.moved_ns),
            )
        )
    return found


def _oldest_state(each: Any, done: int) -> int:
    """Return the state of the oldest step under way; steps end in order. NCCL counts them from 0 or
    1, by its version, so the first of both places that has a state is meant.
    """
    for step in (done, done + 1):
        if state := each.states >> (step % 8) * 8 & 0xFF:
            return int(state)
    return 0


def _ops_by_comm(
    table: bytes,
    unix: Callable[[int], int],
    transfers: Mapping[tuple[int, int], list[NcclTransfer]],
) -> tuple[dict[tuple[int, int], list[NcclOp]], int]:
    """Return the operations by their communicator's index and generation, and how many were being
    written.
    """
    found: dict[tuple[int, int], list[NcclOp]] = defaultdict(list)
    torn = 0
    for index, fields in enumerate(_OP.struct.iter_unpack(table)):
        if not fields[0]:
            continue
        op = _OP.by_name(fields)
        generation = op.seq >> 1 & _GENERATION
        if op.seq & 1 or op.state >> 40 != generation or not op.number:
            torn += 1
            continue
        mine = tuple(transfers.get((index, generation), ()))
        found[op.comm, op.comm_generation].append(_op(op, unix, mine))
    return found, torn


def _op(op: Any, unix: Callable[[int], int], transfers: tuple[NcclTransfer, ...]) -> NcclOp:
    # a late event of the slot's former operation may have left its time
    def after_call(moment: int) -> int:
        return unix(moment) if moment >= op.called_ns else 0

    state = op.state
    device_ns = op.device_stopped_ns - op.device_started_ns
    return NcclOp(
        number=min(op.number, _INT_MAX),
        func=_text(op.func),
        datatype=_text(op.datatype),
        count=min(op.elements, _INT_MAX),
        root=op.root,
        peer=op.peer,
        thread=op.thread,
        called_ns=unix(op.called_ns),
        returned_ns=after_call(op.returned_ns),
        launched_ns=after_call(op.launched_ns),
        started_ns=after_call(op.started_ns),
        stopped_ns=after_call(op.stopped_ns),
        channels=state >> 24 & 0xFF,
        started_on=state >> 16 & 0xFF,
        stopped_on=state >> 8 & 0xFF,
        device_ns=device_ns if op.device_started_ns and 0 < device_ns < 1 << 56 else 0,
        nccl_number=op.nccl_number - 1 if op.nccl_number < 1 << 62 else -1,
        captured=bool(state & _CAPTURED),
        with_kernels=bool(state & _WITH_KERNELS),
        is_message=bool(state & _MESSAGE),
        is_replay=bool(state & _REPLAY),
        transfers=transfers,
    )


def _communicator(comm: Any, ops: list[NcclOp], unix: Callable[[int], int]) -> NcclCommunicator:
    called = [op.number for op in ops if not (op.is_message or op.captured)]
    replayed = [op.number for op in ops if op.is_replay]
    return NcclCommunicator(
        hash=f"{comm.hash:x}",
        name=_text(comm.name),
        size=comm.size,
        rank=comm.rank,
        nodes=comm.nodes,
        nccl_version=comm.nccl_version if comm.nccl_version < 10**6 else 0,
        made_ns=unix(comm.made_ns),
        closed_ns=unix(comm.closed_ns),
        # the operations are read after their communicator
        collectives=max([min(comm.collectives, _INT_MAX), *called]),
        replayed=max([min(comm.replayed, _INT_MAX), *replayed]),
        messages=min(comm.messages, _INT_MAX),
        finished=min(comm.finished_collectives, _INT_MAX),
        ops=tuple(sorted(ops, key=lambda op: (op.is_replay, not op.captured, op.number))),
    )


def encode_record(record: NcclRecord) -> bytes:
    """Return NCCL's events as bytes, for a packed black box."""
    return msgspec.msgpack.encode(record)


def decode_record(content: bytes) -> NcclRecord | None:
    """Return what :func:`encode_record` was given; None if it is damaged."""
    try:
        return msgspec.msgpack.decode(content, type=NcclRecord)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
