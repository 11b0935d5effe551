"""Pack a copy of a black box for a dump or for another node, and unpack it. docs/protocol.md
describes the format.

Two facts make it small: most of a box is empty, and most bytes of a record equal those of the
record before it, so the ring buffer is stored column by column.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

from commlens.blackbox import layout as L
from commlens.blackbox import nccl_events
from commlens.blackbox.copy import Parts, wants_all, whole_records
from commlens.blackbox.header import read_identity
from commlens.errors import FormatError
from commlens.model.nccl import NcclRecord

MAGIC: Final = b"COMMPACK"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sI")
# After the header: size of the file, records kept (0: all), bytes of the two evidence slots and of
# the side table, number of the first slot of the ring buffer that is kept, number of slots.
_SIZES: Final = struct.Struct("<QIIIIII")
_NCCL_SIZE: Final = struct.Struct("<I")  # after the ring buffer, if there are events of NCCL
# slots that are stored column by column together; a file that is cut off keeps its whole blocks
_BLOCK: Final = 256
# 2000 records: 1.8 ms and 40 kB; level 1: 1.3 ms and 42 kB, level 9: 3 ms and 40 kB
_LEVEL: Final = 4
_PAGE: Final = bytes(4096)
_PIECE: Final = 4096


class Unpacked(NamedTuple):
    """The content of a packed box."""

    parts: Parts  # of the ring buffer, only the slots that were kept
    newest: int | None  # records that were kept; None: all
    problems: list[str]  # sentences about parts that are lost
    nccl: NcclRecord | None = None


def is_packed(content: bytes) -> bool:
    """Return whether a file with this beginning is a packed box."""
    return content.startswith(MAGIC)


def is_partial(content: bytes) -> bool:
    """Return whether a file is a packed box with only the newest records, or too damaged to say."""
    if not is_packed(content):
        return False
    stream = _Stream(content[_HEAD.size : _HEAD.size + L.HEADER_SIZE + _PIECE])
    stream.read(L.HEADER_SIZE)
    sizes = stream.read(_SIZES.size)
    return len(sizes) < _SIZES.size or _SIZES.unpack(sizes)[1] != 0


def pack(parts: Parts, newest: int | None = None, nccl: NcclRecord | None = None) -> bytes:
    """Pack a copy of a box: the whole, or only the intact ones of its ``newest`` records, as
    ``parts`` was read; and NCCL's events.
    """
    if newest is not None and wants_all(parts.header, parts.identity.capacity, newest):
        newest = None
    kept = [part[: _used(part)] for part in (*parts.evidence, parts.side)]
    first, ring = (
        (0, parts.ring[: _used(parts.ring)]) if newest is None else _newest_slots(parts, newest)
    )
    slots = min(-(-len(ring) // L.RECORD_SIZE), len(parts.ring) // L.RECORD_SIZE)
    ring = ring.ljust(slots * L.RECORD_SIZE, b"\0")[: slots * L.RECORD_SIZE]
    sizes = _SIZES.pack(parts.size, newest or 0, *map(len, kept), first, slots)
    content = b"".join([parts.header, sizes, *kept, *_columns(ring)])
    if nccl is not None:
        events = nccl_events.encode_record(nccl)
        content += _NCCL_SIZE.pack(len(events)) + events
    return _HEAD.pack(MAGIC, VERSION) + zlib.compress(content, _LEVEL)


def unpack(content: bytes, name: str) -> Unpacked:
    """Unpack a box. Of a damaged file, whatever is intact is returned.

    Raises:
        FormatError: not even the header can be read, or another version packed it.
    """
    if len(content) < _HEAD.size:
        raise FormatError(f"{name} is cut off within its header: {len(content)} bytes are left.")
    _, version = _HEAD.unpack_from(content)
    if version != VERSION:
        raise FormatError(
            f"{name} was packed in version {version}, but this commlens reads version {VERSION}."
        )
    stream = _Stream(content[_HEAD.size :])
    header, sizes = stream.read(L.HEADER_SIZE), stream.read(_SIZES.size)
    identity = read_identity(header, name)
    if len(sizes) < _SIZES.size:
        raise FormatError(f"{name} is cut off or damaged: only its header is left.")
    size, newest, *lengths, first, slots = _SIZES.unpack(sizes)
    slot = identity.evidence_slot
    if (
        max(lengths[:2]) > slot
        or lengths[2] > identity.side_size
        or max(first, slots) > identity.capacity
    ):
        raise FormatError(f"{name} is damaged: its parts are larger than the black box.")
    evidence = (stream.read(lengths[0]), stream.read(lengths[1]))
    side = stream.read(lengths[2])
    ring = _read_ring(stream, slots)
    records, _ = whole_records(ring, range(slots), identity.capacity, first=first)
    problems = []
    nccl: NcclRecord | None = None
    events_size = int.from_bytes(stream.read(_NCCL_SIZE.size), "little")
    if 0 < events_size <= nccl_events.SIZE_MAX:
        nccl = nccl_events.decode_record(stream.read(events_size))
    if not stream.is_whole:
        left = len(ring) // L.RECORD_SIZE
        problems.append(
            f"the file is cut off or damaged: {left} of {slots} records and the parts before them"
            " are left"
        )
    (side_head,) = L.LIVE_WORD.unpack_from(header, L.SIDE_HEAD)
    return Unpacked(
        Parts(identity, header, records, ring, side, side_head, evidence, size),
        newest or None,
        problems,
        nccl,
    )


def _used(part: bytes) -> int:
    """Return the length without the empty pages at the end."""
    end = len(part)
    while end > 0:
        start = (end - 1) // len(_PAGE) * len(_PAGE)
        if part[start:end] != _PAGE[: end - start]:
            break
        end = start
    return end


def _newest_slots(parts: Parts, newest: int) -> tuple[int, bytes]:
    """Return the number of the first slot, and the slots of the newest records; those that are torn
    are empty.
    """
    capacity = parts.identity.capacity
    last = max((record[0] for record in parts.slots), default=0)
    count = min(newest, last, capacity)
    ring = bytearray(count * L.RECORD_SIZE)
    for record in parts.slots:
        at = count - 1 - (last - record[0])
        if at >= 0:
            source = (record[0] - 1) % capacity * L.RECORD_SIZE
            ring[at * L.RECORD_SIZE : (at + 1) * L.RECORD_SIZE] = parts.ring[
                source : source + L.RECORD_SIZE
            ]
    return (last - count) % capacity, bytes(ring)


def _columns(ring: bytes) -> list[bytes]:
    step = _BLOCK * L.RECORD_SIZE
    blocks = (ring[at : at + step] for at in range(0, len(ring), step))
    return [block[column :: L.RECORD_SIZE] for block in blocks for column in range(L.RECORD_SIZE)]


def _read_ring(stream: _Stream, slots: int) -> bytes:
    """Return the slots of the ring buffer, as many as could be read."""
    blocks: list[bytes] = []
    for done in range(0, slots, _BLOCK):
        count = min(_BLOCK, slots - done)
        columns = stream.read(count * L.RECORD_SIZE)
        if len(columns) < count * L.RECORD_SIZE:
            break
        blocks += [columns[slot::count] for slot in range(count)]
    return b"".join(blocks)


class _Stream:
    """The decompressed content, read in order. It ends at damage; what was before it can be
    read.
    """

    def __init__(self, content: bytes) -> None:
        self._decompressor = zlib.decompressobj()
        self._content = content
        self._at = 0

    def read(self, length: int) -> bytes:
        """Return so many bytes; fewer at the end."""
        pieces = []
        try:
            while length > 0:
                left = self._decompressor.unconsumed_tail
                if not left:
                    left = self._content[self._at : self._at + _PIECE]
                    self._at += len(left)
                piece = self._decompressor.decompress(left, length)
                if not piece and not left:
                    break
                pieces.append(piece)
                length -= len(piece)
        except zlib.error:
            self._content = b""
        return b"".join(pieces)

    @property
    def is_whole(self) -> bool:
        """Whether the content, which has been read, ended as it was written: its checksum is
        right.
        """
        return not self.read(1) and self._decompressor.eof
