"""Reads black boxes: those that a process is writing right now, and copies of them in a dump.

docs/protocol.md, "Reading it", is what this module keeps to. The writer takes no lock, may be killed between any two
instructions, and the file may come from anywhere, so nothing in it is believed before it has been checked, and no
damage costs more than bounded time and memory.

Boxes are read with ``pread``, not through a map: a file that is cut short under a map kills its reader with SIGBUS, and
a checked copy cannot change between the check and the use. A poll copies 4 KiB, a whole box of 2000 records 2.2 MB.
"""

from __future__ import annotations

import os
import stat
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, TypeVar

import msgspec

from commlens.errors import FormatError
from commlens.formats import layout as L
from commlens.model.collective import (
    Asked,
    Channel,
    Collective,
    Frame,
    FrameKind,
    LearnedHow,
    ProcessGroup,
    Stack,
    State,
    TensorSpec,
)
from commlens.model.ranklog import RankLog, ThreadStack
from commlens.model.ranks import parse_ranks

SIZE_MAX: Final = L.box_size(L.CAPACITY_MAX) + (16 << 20)  # no box is larger; what claims to be is refused
_RANKS_MAX: Final = 500_000  # ranks spelled out over all groups of a box: the text "0-99999999" is cheap, its tuple is not
_WORLD_MAX: Final = 1 << 24
_INT_MAX: Final = (1 << 63) - 1  # what JSON encoders agree on
_TICKS_MASK: Final = (1 << 48) - 1
_PAUSES_S: Final = (0.0, 0.0002, 0.001, 0.004)  # before a torn record is read again: its writer may have lost the CPU in mid-write
_TEXT_MAX: Final = 4000  # characters of an exception's text that are kept

_LIVE: Final = struct.Struct("<14Q")  # from HEARTBEAT_MONO to RANK_WORLD
# A slot of the ring: the announced part, its CRC-32, the gap, the life words.
_SLOT: Final = struct.Struct(f"{L.RECORD.format}I{L.ENTERED - L.RECORD_CRC_AT - 4}x{(L.RECORD_SIZE - L.ENTERED) // 8}Q")
_HOW: Final = (
    LearnedHow.NOT_YET,
    LearnedHow.RETURN,
    LearnedHow.WAIT,
    LearnedHow.POLL,
    LearnedHow.NATIVE_RECORDER,
    LearnedHow.UNKNOWN,
)
_OUTCOME_STATES: Final = {
    L.OUTCOME_COMPLETED: State.COMPLETED,
    L.OUTCOME_FAILED: State.FAILED,
    L.OUTCOME_UNKNOWN: State.UNKNOWN,
}


class BoxStatus(msgspec.Struct, frozen=True):
    """A box's identity and live words: enough to notice a stall without reading its records.

    Times ending in ``_mono_ns`` are CLOCK_MONOTONIC of the box's machine, to be compared with ``time.monotonic_ns()`` there;
    0 when it has not happened. Blobs are positions: only whether they are 0 matters here.
    """

    job: str
    host: str
    boot_id: str
    pid_namespace: str
    rank: int  # -1 when not known yet
    world_size: int  # 0 when not known yet
    local_rank: int | None
    restart: int
    pid: int
    start_ticks: int  # start of the process in clock ticks since boot: pid and start together name one process
    script: str
    timeout_s: float
    capacity: int
    created_mono_ns: int
    created_ns: int
    heartbeat_mono_ns: int
    heartbeat_ns: int
    issued: int  # records announced so far
    phase: int  # one of layout.PHASE_*
    steps: int
    oldest_index: int  # oldest record in flight as the rank's watchdog thread last saw; 0: none
    oldest_mono_ns: int
    lost: int  # records lost to an error of commlens
    evidence_number: int
    expecting: int  # blob
    exception: int  # blob
    main_stack_since_mono_ns: int

    @property
    def initialised(self) -> bool:
        """Whether ``init_process_group`` has returned."""
        return self.phase >= L.PHASE_INITIALISED

    @property
    def closed(self) -> bool:
        """Whether the process said goodbye."""
        return self.phase in (L.PHASE_CLOSED, L.PHASE_CLOSED_BY_EXCEPTION)

    @property
    def closed_by_exception(self) -> bool:
        """Whether it said goodbye after an uncaught exception or a non-zero ``sys.exit``."""
        return self.phase == L.PHASE_CLOSED_BY_EXCEPTION


def read_status(buffer: bytes | bytearray | memoryview, *, name: str = "the black box") -> BoxStatus:
    """Read a box's header: who wrote it, and its live words.

    Args:
        buffer: the file's first 4096 bytes, or more of it.
        name: what to call the file in an error.

    Raises:
        FormatError: it is no black box of this version, or its header is damaged.
    """
    header = bytes(buffer[: L.HEADER_SIZE])
    return _status(header, _read_identity(header, name))


def read_box(source: Path | bytes, *, name: str | None = None, captured_ns: int | None = None) -> RankLog:
    """Read a whole black box, live or copied.

    What is damaged or was overwritten meanwhile is left out and said in ``RankLog.problems``.

    Args:
        source: the file, or its contents.
        name: what to call it in errors and in ``RankLog.source``; by default its path.
        captured_ns: Unix ns of the moment that the box shows; by default now, which is right for a live one.

    Raises:
        FormatError: it cannot be opened, is no black box of this version, or its header is damaged.
    """
    if isinstance(source, Path):
        with OpenBox(source, name=name) as box:
            return box.log(captured_ns=captured_ns)
    parts = _read_parts(lambda offset, length: source[offset : offset + length], len(source), name or "the black box", live=False)
    return _Reader(parts, name or "the black box", captured_ns).log()


class OpenBox:
    """A black box kept open for polling.

    The descriptor holds the file: a box that is deleted or replaced under it stays readable, one that is cut short gives a
    :class:`FormatError` or a partial log.

    Args:
        path: the file. Only regular files are opened, so that a named pipe cannot block the reader.
        name: what to call it in errors; by default its path.

    Raises:
        FormatError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self._identity: _Identity | None = None
        self._descriptor = -1
        self._descriptor = open_regular(path, self.name)

    def status(self) -> BoxStatus:
        """The identity and the live words, from one read of 4 KiB."""
        header = self._read(0, L.HEADER_SIZE)
        if self._identity is None or header[: L.STATIC.size] != self._identity.raw:
            self._identity = _read_identity(header, self.name)
        return _status(header, self._identity)

    def log(self, *, captured_ns: int | None = None) -> RankLog:
        """Everything in the box as of now."""
        return _Reader(self._parts(), self.name, captured_ns).log()

    def copy(self) -> bytes:
        """The box as a dump holds it: verbatim, but with records that were torn while it was copied read again."""
        parts = self._parts()
        identity = parts.identity
        image = bytearray(self._read(0, identity.total_size))
        for offset, part in (
            (0, parts.header),
            (L.HEADER_SIZE, parts.ring),
            (identity.side_at, parts.side),
            (identity.evidence_at, parts.evidence),
        ):
            end = min(offset + len(part), len(image))
            image[offset:end] = part[: max(0, end - offset)]
        return bytes(image)

    def classifier(self) -> Callable[[str], FrameKind]:
        """Says whose code a file is, by the folders that the process named: for stacks taken of it from outside."""
        if self._identity is None:
            self.status()
        prefixes = _prefixes(self._identity.about) if self._identity is not None else []
        return lambda file: next((kind for prefix, kind in prefixes if file.startswith(prefix)), FrameKind.USER)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OpenBox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _parts(self) -> _Parts:
        try:
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
        return _read_parts(self._read, size, self.name, live=True)

    def _read(self, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        try:
            while length > 0:
                piece = os.pread(self._descriptor, length, offset)
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
        except OSError as error:
            raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_regular(path: Path, name: str) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        FormatError: it does not exist, may not be read, or is not a regular file (which is then not even opened).
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(f"{name} is not a regular file.")
        # Between the two calls it may have become a named pipe: O_NONBLOCK keeps the open from waiting for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise FormatError(f"{name} could not be opened: {reason(error)}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError(f"{name} is not a regular file.")
    return descriptor


def reason(error: BaseException) -> str:
    """An OSError's text as the end of a sentence: ``"permission denied"``."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].lower() + text[1:] if text else type(error).__name__


# --- the header --------------------------------------------------------------------------------------------------


class _Identity(msgspec.Struct, frozen=True):
    """The static part of a header, checked."""

    raw: bytes
    capacity: int
    side_at: int
    side_size: int
    evidence_at: int
    evidence_slot: int
    total_size: int
    pid: int
    rank: int
    world_size: int
    local_rank: int
    start_ticks: int
    created_mono_ns: int
    created_ns: int
    about: dict[str, Any]
    problems: tuple[str, ...]


def _read_identity(header: bytes, name: str) -> _Identity:
    if not header:
        raise FormatError(f"{name} is empty.")
    if header[:8] != L.MAGIC[: len(header)]:
        unwritten = not any(header[: L.STATIC.size])
        raise FormatError(f"{name} has not been written yet." if unwritten else f"{name} is not a commlens black box.")
    if len(header) < L.HEADER_SIZE:
        raise FormatError(f"{name} is cut off within its header: {len(header)} of {L.HEADER_SIZE} bytes are left.")
    raw = header[: L.STATIC.size]
    (_, version, header_size, record_size, capacity, side_at, side_size, evidence_at, evidence_slot, total_size, pid, rank, world_size,
     local_rank, start_ticks, created_mono_ns, created_ns, about_size, about_crc) = L.STATIC.unpack(raw)  # fmt: skip
    if version != L.VERSION:
        # Another version may keep its checksum elsewhere, so this comes before it.
        raise FormatError(
            f"{name} is a black box of layout version {version}, and this commlens reads version {L.VERSION}: "
            "read it with the commlens that wrote it, unless it is damaged."
        )
    if int.from_bytes(header[L.STATIC_CRC_AT : L.STATIC_CRC_AT + 4], "little") != zlib.crc32(raw):
        raise FormatError(f"{name} has a damaged header: its checksum does not match.")
    fits = (
        header_size == L.HEADER_SIZE
        and record_size == L.RECORD_SIZE
        and 1 <= capacity <= L.CAPACITY_MAX
        and L.HEADER_SIZE + capacity * L.RECORD_SIZE <= side_at
        and 0 < side_size <= SIZE_MAX
        and side_at + side_size <= evidence_at
        and L.EVIDENCE.size < evidence_slot <= 1 << 20
        and evidence_at + 2 * evidence_slot <= total_size <= SIZE_MAX
        and about_size <= L.ABOUT_MAX
    )
    if not fits:
        raise FormatError(f"{name} has a header that contradicts itself: its parts do not fit into one another.")
    problems: list[str] = []
    about: dict[str, Any] = {}
    text = header[L.ABOUT_AT : L.ABOUT_AT + about_size]
    try:
        if zlib.crc32(text) != about_crc:
            raise ValueError
        about = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except (ValueError, RecursionError):
        problems.append("the text about the process (job, host, script) is damaged")
    return _Identity(
        raw, capacity, side_at, side_size, evidence_at, evidence_slot, total_size, pid, rank, world_size, local_rank, start_ticks,
        min(created_mono_ns, _INT_MAX), min(created_ns, _INT_MAX), about, tuple(problems),
    )  # fmt: skip


def _about_text(about: dict[str, Any], key: str) -> str:
    value = about.get(key, "")
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else ""


def _about_number(about: dict[str, Any], key: str) -> float:
    value = about.get(key, 0)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _INT_MAX else 0


def _status(header: bytes, identity: _Identity) -> BoxStatus:
    if len(header) < L.HEADER_SIZE:
        raise FormatError("The black box was cut off while it was read.")
    words = _LIVE.unpack_from(header, L.HEARTBEAT_MONO)
    (heartbeat_mono, heartbeat_unix, issued, _head, phase, steps, oldest, oldest_since, lost, evidence, expecting, exception,
     main_since, rank_world) = (min(word, _INT_MAX) for word in words)  # fmt: skip
    rank, world_size = identity.rank, identity.world_size
    if 0 < rank_world >> 32 <= rank_world & 0xFFFFFFFF <= _WORLD_MAX:
        rank, world_size = (rank_world >> 32) - 1, rank_world & 0xFFFFFFFF
    about = identity.about
    return BoxStatus(
        job=_about_text(about, "job"),
        host=_about_text(about, "host"),
        boot_id=_about_text(about, "boot_id"),
        pid_namespace=_about_text(about, "pid_namespace"),
        rank=rank,
        world_size=world_size,
        local_rank=identity.local_rank if identity.local_rank >= 0 else None,
        restart=int(_about_number(about, "restart")),
        pid=identity.pid,
        start_ticks=min(identity.start_ticks, _INT_MAX),
        script=_about_text(about, "script"),
        timeout_s=float(_about_number(about, "timeout_s")),
        capacity=identity.capacity,
        created_mono_ns=identity.created_mono_ns,
        created_ns=identity.created_ns,
        heartbeat_mono_ns=heartbeat_mono,
        heartbeat_ns=heartbeat_unix,
        issued=issued,
        phase=phase,
        steps=steps,
        oldest_index=oldest,
        oldest_mono_ns=oldest_since,
        lost=lost,
        evidence_number=evidence,
        expecting=expecting,
        exception=exception,
        main_stack_since_mono_ns=main_since,
    )


# --- copying a box that is being written -------------------------------------------------------------------------


class _Parts(msgspec.Struct):
    """One copy of a box, each part read after those that refer to it."""

    identity: _Identity
    header: bytes
    slots: list[tuple[int, ...]]  # records that are whole, as _SLOT unpacks them
    ring: bytes
    side: bytes
    side_head: int
    evidence: bytes
    size: int  # of the file


def _read_parts(read: Callable[[int, int], bytes], size: int, name: str, *, live: bool) -> _Parts:
    header = read(0, L.HEADER_SIZE)
    identity = _read_identity(header, name)
    ring_size = identity.capacity * L.RECORD_SIZE
    ring = read(L.HEADER_SIZE, ring_size)
    slots, torn = _whole_records(ring, range(identity.capacity))
    for pause in _PAUSES_S if live else ():
        if not torn:
            break
        time.sleep(pause)
        again = read(L.HEADER_SIZE, ring_size)
        found, torn = _whole_records(again, torn)
        slots += found
        patched = bytearray(ring)
        for record in found:
            at = (record[0] - 1) % identity.capacity * L.RECORD_SIZE
            patched[at : at + L.RECORD_SIZE] = again[at : at + L.RECORD_SIZE]
        ring = bytes(patched)
    # After the ring, because a blob is written before the record that refers to it.
    side = read(identity.side_at, identity.side_size)
    evidence = read(identity.evidence_at, 2 * identity.evidence_slot)
    for _ in _PAUSES_S if live else ():
        # The heartbeat is two words: taken only when two looks agree, so that it never is one of each beat.
        again = read(0, L.HEADER_SIZE)
        if len(again) < L.HEADER_SIZE:
            break
        agreed = again[L.HEARTBEAT_MONO : L.HEARTBEAT_UNIX + 8] == header[L.HEARTBEAT_MONO : L.HEARTBEAT_UNIX + 8]
        header = header[: L.HEARTBEAT_MONO] + again[L.HEARTBEAT_MONO : L.NEXT_INDEX] + header[L.NEXT_INDEX :]
        if agreed:
            break
    (side_head,) = L.LIVE_WORD.unpack_from(header, L.SIDE_HEAD)
    return _Parts(identity, header, slots, ring, side, side_head, evidence, size)


def _whole_records(ring: bytes, numbers: range | list[int]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Unpack the slots called for: the whole records, and the numbers of the slots that hold a torn one."""
    whole: list[tuple[int, ...]] = []
    torn: list[int] = []
    capacity = len(ring) // L.RECORD_SIZE  # fewer than the box's when the file is cut off
    crc32, view = zlib.crc32, memoryview(ring)
    blank = bytes(L.RECORD_CRC_AT + 4)
    every = list(_SLOT.iter_unpack(view[: capacity * L.RECORD_SIZE]))
    for number in numbers:
        if number >= capacity:
            break
        record = every[number]
        at = number * L.RECORD_SIZE
        if record[14] == crc32(view[at : at + L.RECORD_CRC_AT]) and record[0] > 0:
            whole.append(record)
        elif view[at : at + L.RECORD_CRC_AT + 4] != blank:
            torn.append(number)
    return whole, torn


# --- blobs -------------------------------------------------------------------------------------------------------

_Natural = Annotated[int, msgspec.Meta(ge=0, le=_INT_MAX)]
_Line = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]


class _FrameJson(msgspec.Struct, array_like=True, frozen=True):
    file: str
    line: _Line | None
    function: str
    native: str | None = None  # "n": a C++ frame


class _TensorJson(msgspec.Struct, array_like=True, frozen=True):
    shape: tuple[_Natural, ...]
    dtype: str
    device: str = "cpu"
    layout: str = "strided"
    order: tuple[_Natural, ...] | None = None


class _GroupJson(msgspec.Struct, frozen=True, tag_field="k", tag="group"):
    name: str
    ranks: str
    desc: str | None = None
    backend: str | None = None
    device: str | None = None
    mesh_dim: str | None = None
    inc: _Natural = 0


class _AskedJson(msgspec.Struct, frozen=True, tag_field="k", tag="asked", rename={"asynchronous": "async"}):
    op: str
    dop: str | None = None
    inputs: tuple[_TensorJson, ...] = msgspec.field(default=(), name="in")
    outputs: tuple[_TensorJson, ...] = msgspec.field(default=(), name="out")
    rop: str | None = None
    root: _Natural | None = None
    input_splits: tuple[_Natural, ...] | None = msgspec.field(default=None, name="is")
    output_splits: tuple[_Natural, ...] | None = msgspec.field(default=None, name="os")
    asynchronous: bool | None = None


class _StackJson(msgspec.Struct, frozen=True, tag_field="k", tag="stack"):
    f: tuple[_FrameJson, ...]


class _ExceptionJson(msgspec.Struct, frozen=True, tag_field="k", tag="exception"):
    text: str
    f: tuple[_FrameJson, ...] = ()


class _TextJson(msgspec.Struct, frozen=True, tag_field="k", tag="text"):
    text: str


class _ThreadJson(msgspec.Struct, frozen=True):
    tid: _Natural = 0
    name: str = ""
    main: bool = False
    f: tuple[_FrameJson, ...] = ()


class _EvidenceJson(msgspec.Struct, frozen=True):
    threads: tuple[_ThreadJson, ...] = ()


_BlobJson = _GroupJson | _AskedJson | _StackJson | _ExceptionJson | _TextJson
_Kind = TypeVar("_Kind", _GroupJson, _AskedJson, _StackJson, _ExceptionJson, _TextJson)

_decode_blob: Final = msgspec.json.Decoder(_BlobJson).decode
_decode_evidence: Final = msgspec.json.Decoder(_EvidenceJson).decode


class _Reader:
    """Turns one copy of a box into a RankLog. Everything that several records share is decoded once."""

    def __init__(self, parts: _Parts, name: str, captured_ns: int | None) -> None:
        self.parts = parts
        self.identity = parts.identity
        self.name = name
        self.captured_ns = time.time_ns() if captured_ns is None else captured_ns
        self.status = _status(parts.header, parts.identity)
        self.problems = list(parts.identity.problems)
        self.side = memoryview(parts.side)
        # Blobs do not overlap, so an honest box has no more to check than its side table holds; a hostile one could make us
        # check 64 KiB for each of 65,000 records.
        self.budget = 2 * parts.identity.side_size
        self.ranks_left = _RANKS_MAX
        self.blobs: dict[int, _BlobJson | None] = {}
        self.channels: dict[int, Channel | None] = {}
        self.same_channel: dict[Channel, Channel] = {}
        self.asked: dict[tuple[int, int], Asked | None] = {}
        self.same_asked: dict[Asked, Asked] = {}
        self.stacks: dict[int, Stack | None] = {}
        self.same_stack: dict[Stack, Stack] = {}
        self.files: dict[str, FrameKind] = {}
        self.prefixes = _prefixes(parts.identity.about)
        self.shift = self._monotonic_to_unix()

    # --- times

    def _monotonic_to_unix(self) -> int:
        """What to add to CLOCK_MONOTONIC. The latest pair counts: the wall clock may have been set since the creation.

        One offset serves the whole box, so that no span within it is ever stretched.
        """
        status = self.status
        if status.heartbeat_ns and status.heartbeat_mono_ns >= status.created_mono_ns:
            return status.heartbeat_ns - status.heartbeat_mono_ns
        return status.created_ns - status.created_mono_ns

    def unix(self, monotonic_ns: int) -> int:
        """CLOCK_MONOTONIC ns as Unix ns; 0 stays 0."""
        return min(max(monotonic_ns + self.shift, 1), _INT_MAX) if monotonic_ns else 0

    # --- blobs

    def blob(self, position: int, kind: type[_Kind]) -> _Kind | None:
        """The blob at a position, if it is alive, whole and of this kind."""
        if position not in self.blobs:
            self.blobs[position] = self._fetch(position)
        found = self.blobs[position]
        return found if isinstance(found, kind) else None

    def _fetch(self, position: int) -> _BlobJson | None:
        size = self.identity.side_size
        if position <= 0 or (position - 1) % L.BLOB_ALIGN:
            return None
        if position <= self.parts.side_head - size:
            return None  # overwritten
        at = (position - 1) % size
        if at + L.BLOB.size > len(self.side):
            return None
        length, crc, own_position = L.BLOB.unpack_from(self.side, at)
        start = at + L.BLOB.size
        if own_position != position or length > L.BLOB_MAX or start + length > len(self.side) or length > self.budget:
            return None  # damaged, or overwritten after the head was copied
        self.budget -= length
        payload = bytes(self.side[start : start + length])
        if crc != L.blob_crc(position, payload):
            return None
        try:
            blob: _BlobJson = _decode_blob(payload)
            return blob
        except (ValueError, RecursionError):  # msgspec's errors and UnicodeDecodeError are ValueErrors
            return None

    def channel(self, position: int) -> Channel | None:
        """The channel that a group blob describes."""
        if position not in self.channels:
            blob = self.blob(position, _GroupJson)
            channel = None
            if blob is not None:
                try:
                    ranks = parse_ranks(blob.ranks, limit=self.ranks_left)
                except ValueError:
                    ranks = ()
                self.ranks_left -= len(ranks)
                group = ProcessGroup(blob.name, ranks, blob.desc or "", blob.backend or "", blob.mesh_dim, blob.inc)
                channel = Channel(group, blob.device or "") if ranks else None
                if channel is not None:
                    channel = self.same_channel.setdefault(channel, channel)
            self.channels[position] = channel
        return self.channels[position]

    def what_was_asked(self, position: int, reduce_code: int) -> Asked | None:
        """An asked blob, with the reduce op that the watchdog thread filled in later (code + 1; 0: none)."""
        key = (position, reduce_code)
        if key not in self.asked:
            blob = self.blob(position, _AskedJson)
            asked = None
            if blob is not None:
                later = L.REDUCE_OPS[reduce_code - 1] if 0 < reduce_code <= len(L.REDUCE_OPS) else None
                asked = Asked(
                    op=blob.op,
                    dispatcher_op=blob.dop or blob.op,
                    inputs=tuple(_tensor(spec) for spec in blob.inputs),
                    outputs=tuple(_tensor(spec) for spec in blob.outputs),
                    reduce_op=blob.rop or later,
                    root=blob.root,
                    input_splits=blob.input_splits or (),
                    output_splits=blob.output_splits or (),
                    asynchronous=blob.asynchronous,
                )
                asked = self.same_asked.setdefault(asked, asked)
            self.asked[key] = asked
        return self.asked[key]

    def stack(self, position: int) -> Stack | None:
        """A stack blob's frames."""
        if position not in self.stacks:
            blob = self.blob(position, _StackJson)
            stack = self.frames(blob.f) if blob is not None else None
            self.stacks[position] = stack if stack is None else self.same_stack.setdefault(stack, stack)
        return self.stacks[position]

    def text(self, position: int) -> str | None:
        """A text blob's text."""
        blob = self.blob(position, _TextJson)
        return blob.text if blob is not None else None

    # --- frames

    def frames(self, found: tuple[_FrameJson, ...]) -> Stack:
        """Frames with their kinds."""
        return tuple(Frame(f.file, max(f.line or 0, 0), f.function, FrameKind.NATIVE if f.native else self.kind_of(f.file)) for f in found)

    def kind_of(self, file: str) -> FrameKind:
        """Whose code a file is, by the folders that the process named."""
        kind = self.files.get(file)
        if kind is None:
            kind = self.files[file] = next((kind for prefix, kind in self.prefixes if file.startswith(prefix)), FrameKind.USER)
        return kind

    # --- the log

    def log(self) -> RankLog:
        """Everything in the box."""
        status, about = self.status, self.identity.about
        collectives = self._collectives()
        stacks, stacks_ns = self._evidence()
        exception, exception_stack = self._exception()
        expecting = None
        if status.expecting:
            expecting = self.text(status.expecting)
            if expecting is None:
                expecting = "something slow"
                self.problems.append("the label of the open expect_slow could not be read")
        coverage = about.get("coverage", [])
        if not isinstance(coverage, list):
            coverage = [coverage]
        if status.lost:
            self.problems.append(f"{status.lost} collectives were not recorded because of an error inside commlens")
        if status.phase > L.PHASE_CLOSED_BY_EXCEPTION:
            self.problems.append("the word that says how far the process came is damaged")
        if self.parts.size < self.identity.total_size:
            self.problems.insert(0, f"the file is cut off: {self.parts.size} of {self.identity.total_size} bytes are left")
        return RankLog(
            rank=status.rank,
            world_size=max(0, status.world_size),
            job=status.job,
            host=status.host,
            pid=status.pid,
            local_rank=status.local_rank,
            restart=status.restart,
            collectives=collectives,
            issued=self.issued,
            stacks=stacks,
            stacks_ns=stacks_ns,
            heartbeat_ns=status.heartbeat_ns,
            captured_ns=self.captured_ns,
            steps=status.steps,
            expecting=expecting,
            closed=status.closed,
            exception=exception,
            exception_stack=exception_stack,
            initialised=status.initialised,
            timeout_s=status.timeout_s,
            coverage=[text for text in coverage if isinstance(text, str)],
            source=self.name,
            problems=self.problems,
            script=status.script,
            versions={key: text for key in ("commlens", "torch", "python") if (text := _about_text(about, key))},
        )

    def _exception(self) -> tuple[str | None, Stack]:
        status = self.status
        if not status.exception:
            return (None, ()) if not status.closed_by_exception else ("a non-zero exit status", ())
        blob = self.blob(status.exception, _ExceptionJson)
        if blob is None:
            self.problems.append("the text of the uncaught exception could not be read")
            return "an exception whose text is lost", ()
        line = next((line.strip() for line in blob.text.splitlines() if line.strip()), "an exception without a text")
        return line[:_TEXT_MAX], self.frames(blob.f)

    def _evidence(self) -> tuple[list[ThreadStack], int]:
        """The newest whole evidence slot. The other one may be in the middle of being written."""
        slot_size = self.identity.evidence_slot
        best: tuple[int, int, memoryview] | None = None
        for number in (0, 1):
            slot = memoryview(self.parts.evidence)[number * slot_size : (number + 1) * slot_size]
            if len(slot) < L.EVIDENCE.size:
                continue
            length, crc, count, taken = L.EVIDENCE.unpack_from(slot)
            payload = slot[L.EVIDENCE.size : L.EVIDENCE.size + length]
            if (best is None or count > best[0]) and count % 2 == number and len(payload) == length and count:
                if crc != zlib.crc32(payload):
                    continue
                best = (count, taken, payload)
        threads: tuple[_ThreadJson, ...] | None = None
        if best is not None:
            try:
                threads = _decode_evidence(best[2]).threads
            except (ValueError, RecursionError):
                threads = None
        if best is None or threads is None:
            if self.status.evidence_number:
                self.problems.append("the threads' stacks could not be read")
            return [], 0
        taken_ns = self.unix(best[1])
        return [ThreadStack(t.tid, t.name, self.frames(t.f), taken_ns, t.main) for t in threads], taken_ns

    def _collectives(self) -> list[Collective]:
        capacity = self.identity.capacity
        newest = max((record[0] for record in self.parts.slots), default=0)
        self.issued = max(newest, self.status.issued)
        if newest and self.issued > newest + capacity:
            self.problems.append("the count of collectives is damaged")
            self.issued = newest
        oldest = max(0, self.issued - capacity)
        # While the ring was copied the writer went on: what it overwrote meanwhile is older than the box.
        # A slot's number follows from its index, so a record whose index belongs elsewhere is a stray copy.
        held = {record[0]: record for record in self.parts.slots if record[0] > oldest}
        result: list[Collective] = []
        lost_channels = lost_asked = lost_stacks = 0
        for index in sorted(held):
            record = held[index]
            channel = self.channel(record[2])
            if channel is None:
                lost_channels += 1
                continue
            collective = self._collective(record, channel)
            if collective is None:
                lost_channels += 1
                continue
            lost_asked += collective.asked.op == "unknown"
            lost_stacks += record[4] != 0 and self.stack(record[4]) is None
            result.append(collective)
        unreadable = min(self.issued, capacity) - len(held)
        self._count(unreadable, "torn or damaged and left out")
        self._count(lost_channels, "left out because their group was overwritten or is damaged")
        self._count(lost_asked, "known without what was asked, which was overwritten or is damaged")
        self._count(lost_stacks, "known without their stacks, which were overwritten or are damaged")
        return result

    def _count(self, count: int, what: str) -> None:
        if count > 0:
            self.problems.append(f"{count} of the last {min(self.issued, self.identity.capacity)} records are {what}")

    def _collective(self, record: tuple[int, ...], channel: Channel) -> Collective | None:
        (index, announced, _group, asked_at, stack_at, module_at, sequence_number, step, coalescing_id, tag, thread, flags, peer, members,
         _crc, entered, returned, wait_began, wait_ended, done, outcome, failure, reduce_op, duration) = record  # fmt: skip
        own = index & L.TAG_MASK
        ticks = (announced - self.identity.created_mono_ns) // L.TICK_NS
        announced_ns = self.unix(announced)

        def moment(word: int) -> int:
            if word & L.TAG_MASK != own or not word >> 16:
                return 0
            passed = ((word >> 16) - ticks) & _TICKS_MASK
            # Before the announcement: left by an older record whose index ends in the same 16 bits.
            return 0 if passed >> 47 else min(announced_ns + passed * L.TICK_NS, _INT_MAX)

        def value(word: int) -> int:
            return word >> 16 if word & L.TAG_MASK == own else 0

        asked = self.what_was_asked(asked_at, value(reduce_op))
        if asked is None:
            if flags & L.FLAG_ANY_SOURCE:
                asked = Asked("recv", "unknown")
            elif peer >= 0:
                return None  # a send or a receive: its sequence number means nothing without the direction
            else:
                asked = Asked("unknown", "unknown")
        entered_ns = announced_ns if flags & L.FLAG_ENTERED else moment(entered)
        ended = value(outcome)
        result, how = (ended >> 8) & 0xFF, ended & 0xFF
        if result == L.OUTCOME_NONE:
            state = State.ISSUED if entered_ns else State.ANNOUNCED
        else:
            state = _OUTCOME_STATES.get(result, State.UNKNOWN)
        error = None
        if state is State.FAILED:
            error = (self.text(value(failure)) or "its text is lost")[:_TEXT_MAX]
        module = self.text(module_at) if module_at else None
        device_ticks = value(duration)
        return Collective(
            index=index,
            channel=channel,
            sequence_number=min(sequence_number, _INT_MAX),
            asked=asked,
            state=state,
            announced_ns=announced_ns,
            entered_ns=entered_ns,
            returned_ns=moment(returned),
            wait_began_ns=moment(wait_began),
            wait_ended_ns=moment(wait_ended),
            done_ns=moment(done),
            learned_how=(_HOW[how] if how < len(_HOW) else LearnedHow.UNKNOWN) if result else LearnedHow.NOT_YET,
            stack=(self.stack(stack_at) or ()) if stack_at else (),
            issue_thread=thread,
            wait_thread=ended >> 16,
            peer=peer if peer >= 0 else None,
            tag=tag,
            step=min(step, _INT_MAX),
            coalescing_id=min(coalescing_id, _INT_MAX),
            coalesced_members=members if flags & L.FLAG_COALESCED_END else 0,
            duration_ns=device_ticks * L.TICK_NS if device_ticks else None,
            error=error,
            concurrent=bool(flags & L.FLAG_CONCURRENT),
            module=module,
        )


def _tensor(spec: _TensorJson) -> TensorSpec:
    return TensorSpec(spec.shape, spec.dtype, spec.device, spec.layout, spec.order)


def _prefixes(about: dict[str, Any]) -> list[tuple[str, FrameKind]]:
    """Which kind each path prefix stands for, the first match counting.

    Packages beside torch in site-packages are the user's: they issue collectives in the user's name, and their lines are
    what can be looked at.
    """
    named = about.get("prefixes")
    named = named if isinstance(named, dict) else {}

    def folders(key: str) -> list[str]:
        value = named.get(key, [])
        found = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]
        return [text if text.startswith("<") else text.rstrip("/") + "/" for text in found]

    commlens, torch, python = folders("commlens"), folders("torch"), folders("python")
    result = [(f"{folder}scenarios/", FrameKind.USER) for folder in commlens]
    result += [(folder, FrameKind.COMMLENS) for folder in commlens]
    result += [(folder, FrameKind.TORCH) for folder in torch]
    for folder in python:
        if not folder.startswith("<"):
            result += [(f"{folder}site-packages/", FrameKind.USER), (f"{folder}dist-packages/", FrameKind.USER)]
    result += [(folder, FrameKind.PYTHON) for folder in python]
    result += [("<frozen", FrameKind.PYTHON), ("<eval_with_key", FrameKind.TORCH)]
    return result
