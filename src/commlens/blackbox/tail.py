"""Follow a live black box: read only new records and the blobs that they refer to.

A poll without new records reads 40 bytes.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from commlens.blackbox import layout as L
from commlens.blackbox.blobs import BlobJson, decode_blob
from commlens.blackbox.reader import OpenBox
from commlens.errors import FormatError

# heartbeat, Unix heartbeat, records announced, bytes written to the side table, phase
_LIVE: Final = struct.Struct("<5Q")
# The fields of a slot that a comparison needs: all but the announcement, the module, the thread and
# the life words other than the reduce op's.
_SLOT: Final = struct.Struct(
    f"<Q8xQQQ8xQQQq4xIiII{L.REDUCE_OP - L.RECORD_CRC_AT - 4}xQ{L.RECORD_SIZE - L.REDUCE_OP - 8}x"
)
_REDUCE_WORD: Final = struct.Struct(f"<{L.REDUCE_OP}xQ{L.RECORD_SIZE - L.REDUCE_OP - 8}x")
# how often a torn record is read again: its writer may have been preempted, or died, in mid-write
_TORN_READS_MAX: Final = 20
_BLOB_GUESS: Final = 768  # most blobs are shorter: one read


Raw = tuple[int, ...]
"""One new record: (0) index, (1-3) positions of the blobs of group, arguments and stack, (4)
sequence number, (5) step, (6) coalescing id, (7) tag, (8) flags, (9) peer, (10) members, (11) CRC,
and (12) the raw life word of the reduce op (see :func:`reduce_code`).
"""


def reduce_code(word: int, index: int) -> int:
    """Return the reduce op's code + 1 in a record's life word; 0 if not yet written."""
    code = word >> 16
    return code if word & L.TAG_MASK == index & L.TAG_MASK and code <= len(L.REDUCE_OPS) else 0


class BoxTail:
    """The records of a box, each returned once. The owner of the box closes it."""

    def __init__(self, box: OpenBox) -> None:
        identity = box.identity
        self._box = box
        self.capacity = identity.capacity
        self._side_at, self._side_size = identity.side_at, identity.side_size
        self.next = 1  # index of the first record to read at the next poll
        # records that were overwritten before they were read, skipped, or torn for good
        self.missed = 0
        self.heartbeat = 0  # of the rank's watchdog thread, CLOCK_MONOTONIC ns, as of the last poll
        self.issued = 0  # index of the newest record, as of the last poll
        self.is_closed = False  # nothing is written into the box any more, as of the last poll
        self._torn: dict[int, int] = {}  # index of a torn record: number of reads so far

    def poll(self, at_most: int) -> list[Raw]:
        """Return the new records, oldest first, after those that were torn at earlier polls. Of
        more than ``at_most`` new records, only the newest are read.
        """
        live = self._box.read(L.HEARTBEAT_MONO, _LIVE.size)
        if len(live) < _LIVE.size:
            raise FormatError(f"{self._box.name} was cut off while it was read.")
        self.heartbeat, _, self.issued, _, phase = _LIVE.unpack(live)
        self.is_closed = phase in L.PHASES_CLOSED
        found = self._reread_torn() if self._torn else []
        if self.issued < self.next:
            return found
        first = max(self.next, self.issued - min(self.capacity, at_most) + 1)
        self.missed += first - self.next
        found += self._read(first, self.issued)
        self.next = self.issued + 1
        return found

    def was_never_issued(self, index: int) -> bool:
        """Return whether an op failed before it reached the backend, so that a later op may have
        its sequence number.
        """
        slot = self._slots(index, index)
        if len(slot) < L.RECORD_SIZE or int.from_bytes(slot[:8], "little") != index:
            return False
        own = index & L.TAG_MASK
        outcome, returned = (
            int.from_bytes(slot[at : at + 8], "little") for at in (L.OUTCOME, L.RETURNED)
        )
        return (
            outcome & L.TAG_MASK == own
            and outcome >> 24 & 0xFF == L.OUTCOME_FAILED
            and returned & L.TAG_MASK != own
        )

    def reduce_words(self, first: int, last: int) -> list[int]:
        """Return the reduce op's life words of the records ``first`` to ``last``, for
        :func:`reduce_code`.
        """
        return [word for (word,) in _REDUCE_WORD.iter_unpack(self._slots(first, last))]

    def blob(self, position: int) -> bytes | None:
        """Return a blob's payload if it is alive and intact."""
        if position <= 0 or (position - 1) % L.BLOB_ALIGN:
            return None
        at = (position - 1) % self._side_size
        room = self._side_size - at
        piece = self._box.read(self._side_at + at, min(_BLOB_GUESS, room))
        if len(piece) < L.BLOB.size:
            return None
        length, crc, own = L.BLOB.unpack_from(piece)
        end = L.BLOB.size + length
        if own != position or length > L.BLOB_MAX or end > room:
            return None
        if end > len(piece):
            piece += self._box.read(self._side_at + at + len(piece), end - len(piece))
        payload = piece[L.BLOB.size : end]
        return payload if crc == L.blob_crc(position, payload) else None

    def decoded(self, position: int) -> BlobJson | None:
        """Return a decoded blob if it is alive and intact."""
        payload = self.blob(position)
        return decode_blob(payload) if payload is not None else None

    def _read(self, first: int, last: int) -> list[Raw]:
        ring = memoryview(self._slots(first, last))
        crc32 = zlib.crc32
        size, upto = L.RECORD_SIZE, L.RECORD_CRC_AT
        found: list[Raw] = []
        at = 0
        for index, raw in enumerate(_SLOT.iter_unpack(ring), first):
            if raw[0] == index and raw[11] == crc32(ring[at : at + upto]):
                found.append(raw)
            elif raw[0] > index:
                self.missed += 1  # overwritten
            else:
                self._torn[index] = 0
            at += size
        return found

    def _reread_torn(self) -> list[Raw]:
        found: list[Raw] = []
        for index, reads in list(self._torn.items()):
            slot = self._slots(index, index)
            raw = _SLOT.unpack(slot) if len(slot) == _SLOT.size else None
            if (
                raw is not None
                and raw[0] == index
                and raw[11] == zlib.crc32(slot[: L.RECORD_CRC_AT])
            ):
                found.append(raw)
            elif reads < _TORN_READS_MAX and index + self.capacity > self.issued:
                self._torn[index] = reads + 1
                continue
            else:
                self.missed += 1
            del self._torn[index]
        return found

    def _slots(self, first: int, last: int) -> bytes:
        """Return the slots of the records ``first`` to ``last`` in order; whole slots only."""
        begin = (first - 1) % self.capacity
        count = min(last - first + 1, self.capacity)
        here = min(count, self.capacity - begin)
        ring = self._box.read(L.HEADER_SIZE + begin * L.RECORD_SIZE, here * L.RECORD_SIZE)
        if here < count and len(ring) == here * L.RECORD_SIZE:
            ring += self._box.read(L.HEADER_SIZE, (count - here) * L.RECORD_SIZE)
        return ring[: len(ring) // L.RECORD_SIZE * L.RECORD_SIZE]
