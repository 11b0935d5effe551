"""Copies a black box while it may be written, without accepting torn records.

A record's checksum shows whether it was read while its writer was at it; then it is read again, up
to four times within 5 ms. Parts are read before the parts that they refer to, so no reference leads
to something that was not there yet.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from commlens.blackbox import layout as L
from commlens.blackbox.header import INT_MAX, Identity, read_identity

# before rereading a torn record: its writer may have been preempted in mid-write
_PAUSES_S: Final = (0.0, 0.0002, 0.001, 0.004)
# A slot of the ring buffer: the announced part, its CRC-32, a gap, the life words.
_SLOT: Final = struct.Struct(
    f"{L.RECORD.format}I{L.ENTERED - L.RECORD_CRC_AT - 4}x{(L.RECORD_SIZE - L.ENTERED) // 8}Q"
)


class Parts(msgspec.Struct):
    """A copy of a box. Each part is read after the parts that refer to it."""

    identity: Identity
    header: bytes
    slots: list[tuple[int, ...]]  # intact records, as _SLOT unpacks them
    ring: bytes
    side: bytes
    side_head: int
    evidence: tuple[bytes, bytes]  # the two slots; of a packed box, without the empty end
    size: int  # of the file


def read_parts(
    read: Callable[[int, int], bytes],
    size: int,
    name: str,
    *,
    live: bool,
    newest: int | None = None,
) -> Parts:
    """Copy a box: all records, or only the ``newest``.

    ``read`` returns the bytes at (offset, length), fewer at the end of the file. Rereading helps
    only if the file is ``live``.
    """
    header = read(0, L.HEADER_SIZE)
    identity = read_identity(header, name)
    ring_size = identity.capacity * L.RECORD_SIZE
    ring = read(L.HEADER_SIZE, ring_size)
    slots, torn = whole_records(
        ring, _numbers(header, identity.capacity, newest), identity.capacity
    )
    for pause in _PAUSES_S if live else ():
        if not torn:
            break
        time.sleep(pause)
        again = read(L.HEADER_SIZE, ring_size)
        found, torn = whole_records(again, torn, identity.capacity)
        slots += found
        patched = bytearray(ring)
        for record in found:
            at = (record[0] - 1) % identity.capacity * L.RECORD_SIZE
            patched[at : at + L.RECORD_SIZE] = again[at : at + L.RECORD_SIZE]
        ring = bytes(patched)
    # After the ring buffer, because a blob is written before the record that refers to it.
    side = read(identity.side_at, identity.side_size)
    both = read(identity.evidence_at, 2 * identity.evidence_slot)
    evidence = (both[: identity.evidence_slot], both[identity.evidence_slot :])
    if live:
        header = _with_whole_heartbeat(read, header)
    (side_head,) = L.LIVE_WORD.unpack_from(header, L.SIDE_HEAD)
    return Parts(identity, header, slots, ring, side, side_head, evidence, size)


def _with_whole_heartbeat(read: Callable[[int, int], bytes], header: bytes) -> bytes:
    """Return the header with a present heartbeat. It is two words: that two reads agree proves that
    both words are of one beat.
    """
    for _ in _PAUSES_S:
        again = read(0, L.HEADER_SIZE)
        if len(again) < L.HEADER_SIZE:
            break
        before, beat = (each[L.HEARTBEAT_MONO : L.NEXT_INDEX] for each in (header, again))
        header = header[: L.HEARTBEAT_MONO] + beat + header[L.NEXT_INDEX :]
        if beat == before:
            break
    return header


def wants_all(header: bytes, capacity: int, newest: int | None) -> bool:
    """Return whether the ``newest`` records are all that a box with this header has."""
    (issued,) = L.LIVE_WORD.unpack_from(header, L.NEXT_INDEX)
    return newest is None or newest >= capacity or issued <= newest


def _numbers(header: bytes, capacity: int, newest: int | None) -> range | list[int]:
    if newest is None or wants_all(header, capacity, newest):
        return range(capacity)
    (issued,) = L.LIVE_WORD.unpack_from(header, L.NEXT_INDEX)
    return sorted((index - 1) % capacity for index in range(issued - newest + 1, issued + 1))


def whole_records(
    ring: bytes, numbers: range | list[int], capacity: int, *, first: int = 0
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the intact records among these slots, and the numbers of the slots with a torn record.

    Numbers are positions in ``ring``, which begins with slot ``first`` of the ring buffer.
    """
    whole: list[tuple[int, ...]] = []
    torn: list[int] = []
    present = len(ring) // L.RECORD_SIZE  # fewer than the capacity if the file is cut off
    crc32, view = zlib.crc32, memoryview(ring)
    blank = bytes(L.RECORD_CRC_AT + 4)
    for number in numbers:
        if number >= present:
            break
        at = number * L.RECORD_SIZE
        record = _SLOT.unpack_from(view, at)
        index = record[0]
        if (
            0 < index <= INT_MAX
            and (index - 1 - first - number) % capacity == 0
            and record[14] == crc32(view[at : at + L.RECORD_CRC_AT])
        ):
            whole.append(record)
        elif view[at : at + L.RECORD_CRC_AT + 4] != blank:
            torn.append(number)
    return whole, torn
