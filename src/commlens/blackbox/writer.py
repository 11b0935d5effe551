"""Write one rank's black box. Standard library only; docs/protocol.md describes each byte.

The hot path is :meth:`BoxWriter.announce` and the life words. Nothing here takes a lock on it: a
record's slot belongs to the thread that drew its index (``itertools.count`` is atomic), and only
the side table, which is written when something is seen for the first time, is locked.

Live words are items of a memoryview of u64: each is one aligned store. ``struct.pack_into`` would
clear the word before it writes, and a reader could meet the 0.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from commlens.blackbox import layout as L

_pack_record = L.RECORD.pack
_WORD = 8  # bytes
_NEXT_INDEX = L.NEXT_INDEX // _WORD
_RETURNED, _WAIT_BEGAN, _WAIT_ENDED, _DONE, _OUTCOME = (
    field // _WORD for field in (L.RETURNED, L.WAIT_BEGAN, L.WAIT_ENDED, L.DONE, L.OUTCOME)
)
_COMPLETED_BY_WAIT = (L.OUTCOME_COMPLETED << 24) | (L.HOW_WAIT << 16)
_crc32 = zlib.crc32
_monotonic = time.monotonic_ns
_CRC_BYTES = 4


class BoxWriter:
    """A black box in a file of its own, allocated whole before anything is mapped.

    Args:
        path: the file; must not exist.
        capacity: records in the ring buffer, at most :data:`layout.CAPACITY_MAX`.
        rank, world_size: -1 and 0 if not yet known.
        local_rank: -1 if unknown.
        start_ticks: the process's start time, which distinguishes it from a later process with the
            same pid.
        about: the JSON object of the header; values that do not fit are dropped, the longest first.

    Raises:
        OSError: no space, no permission, or the file exists.
    """

    def __init__(
        self,
        path: Path,
        *,
        capacity: int,
        rank: int,
        world_size: int,
        local_rank: int,
        start_ticks: int,
        about: dict[str, Any],
    ) -> None:
        self.path = path
        self.capacity = max(1, min(capacity, L.CAPACITY_MAX))
        size = L.box_size(self.capacity)
        self._side_at = size - 2 * L.EVIDENCE_SLOT - L.side_size(self.capacity)
        self._side_size = L.side_size(self.capacity)
        self._evidence_at = size - 2 * L.EVIDENCE_SLOT
        self._side_lock = threading.Lock()
        self._side_head = 0
        self._evidence_seq = 0
        self.last_index = 0
        self.side_floor = 0  # new records must not refer to blobs up to this position
        self.epoch = _monotonic()
        # Built under a temporary name: a reader that lists the folder never sees a box without its
        # header.
        building = path.with_suffix(".new")
        descriptor = os.open(building, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # ftruncate alone would let the first touch of a full tmpfs kill the process with
            # SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
            self._words = memoryview(self._map).cast("Q")
            self._write_header(size, rank, world_size, local_rank, start_ticks, about)
            building.rename(path)
        except BaseException:
            building.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.next_index = itertools.count(1).__next__

    def _write_header(
        self,
        size: int,
        rank: int,
        world_size: int,
        local_rank: int,
        start_ticks: int,
        about: dict[str, Any],
    ) -> None:
        text = _fitting_json(about, L.ABOUT_MAX)
        static = L.STATIC.pack(
            L.MAGIC,
            L.VERSION,
            L.HEADER_SIZE,
            L.RECORD_SIZE,
            self.capacity,
            self._side_at,
            self._side_size,
            self._evidence_at,
            L.EVIDENCE_SLOT,
            size,
            os.getpid(),
            rank,
            world_size,
            local_rank,
            start_ticks,
            self.epoch,
            time.time_ns(),
            len(text),
            _crc32(text),
        )
        self._map[L.ABOUT_AT : L.ABOUT_AT + len(text)] = text
        self._map[L.STATIC_CRC_AT : L.STATIC_CRC_AT + _CRC_BYTES] = _crc32(static).to_bytes(
            _CRC_BYTES, "little"
        )
        self._map[: len(static)] = static
        self.heartbeat()

    # --- header words

    def word(self, offset: int, value: int) -> None:
        """Write one live word of the header."""
        self._words[offset // _WORD] = value

    def heartbeat(self) -> None:
        """Record that the watchdog thread is running."""
        self.word(L.HEARTBEAT_UNIX, time.time_ns())
        self.word(L.HEARTBEAT_MONO, _monotonic())

    # --- records. A life word is not written once a newer record has the slot, whose words it would
    # overwrite

    def announce(self, record: tuple[int, ...]) -> int:
        """Write a whole record and return the offset of its slot, which the life words need.

        The hot path passes a plain tuple, which is 0.3 us faster to make than a
        :class:`commlens.blackbox.layout.Record`.
        """
        index = record[0]
        offset = L.HEADER_SIZE + (index - 1) % self.capacity * L.RECORD_SIZE
        packed = _pack_record(*record)
        self._map[offset : offset + L.RECORD_CRC_AT + _CRC_BYTES] = packed + _crc32(
            packed
        ).to_bytes(_CRC_BYTES, "little")
        self._words[_NEXT_INDEX] = index
        self.last_index = index
        return offset

    @property
    def last_thread(self) -> int:
        """The native id of the thread that issued the newest record; 0 without a record."""
        if not self.last_index:
            return 0
        offset = L.HEADER_SIZE + (self.last_index - 1) % self.capacity * L.RECORD_SIZE
        return L.Record(*L.RECORD.unpack_from(self._map, offset)).thread

    def forget_number(self, offset: int, index: int) -> None:
        """Remove a record's sequence number, which a later record gets: by it ranks align."""
        if index + self.capacity > self.last_index:
            record = bytearray(self._map[offset : offset + L.RECORD_CRC_AT])
            record[L.SEQUENCE_NUMBER : L.SEQUENCE_NUMBER + _WORD] = bytes(_WORD)
            self._map[offset : offset + L.RECORD_CRC_AT + _CRC_BYTES] = bytes(record) + _crc32(
                record
            ).to_bytes(_CRC_BYTES, "little")

    def mark(self, offset: int, field: int, index: int, now: int) -> None:
        """Write a life word that is a time: ``field`` is its offset in the record, ``now``
        CLOCK_MONOTONIC ns.
        """
        if index + self.capacity > self.last_index:
            self._words[(offset + field) // _WORD] = ((now - self.epoch) // 100 << 16) | (
                index & 0xFFFF
            )

    def mark_value(self, offset: int, field: int, index: int, value: int) -> None:
        """Write a life word that is a value of at most 48 bits."""
        if index + self.capacity > self.last_index:
            self._words[(offset + field) // _WORD] = (value << 16) | (index & 0xFFFF)

    def wait_began(self, offset: int, index: int, now: int, thread: int, returned: bool) -> None:
        """Record that ``thread`` waits since ``now`` and, with ``returned``, that the issuing call
        returned just before.
        """
        if index + self.capacity <= self.last_index:
            return
        tag = index & 0xFFFF
        began = ((now - self.epoch) // 100 << 16) | tag
        words, at = self._words, offset // _WORD
        if returned:
            words[at + _RETURNED] = began
        words[at + _WAIT_ENDED] = 0
        words[at + _DONE] = 0
        words[at + _OUTCOME] = (thread << 32) | tag
        words[at + _WAIT_BEGAN] = began

    def wait_completed(self, offset: int, index: int, now: int, thread: int) -> None:
        """Record that the wait ended and the op completed."""
        if index + self.capacity <= self.last_index:
            return
        tag = index & 0xFFFF
        ended = ((now - self.epoch) // 100 << 16) | tag
        words, at = self._words, offset // _WORD
        words[at + _WAIT_ENDED] = ended
        words[at + _DONE] = ended
        words[at + _OUTCOME] = (thread << 32) | _COMPLETED_BY_WAIT | tag

    def mark_outcome(
        self, offset: int, index: int, outcome: int, how: int, thread: int = 0
    ) -> None:
        """Write the outcome of a record or, with outcome 0, the thread that waits for it."""
        if index + self.capacity > self.last_index:
            self._words[(offset + L.OUTCOME) // _WORD] = (
                (thread << 32) | (outcome << 24) | (how << 16) | (index & 0xFFFF)
            )

    # --- side table

    def add_blob(self, content: dict[str, Any]) -> int:
        """Append a JSON object to the side table and return its position; 0 if it is too large."""
        payload = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "replace"
        )
        return self._append(payload) if len(payload) <= L.BLOB_MAX else 0

    def _append(self, payload: bytes) -> int:
        need = (L.BLOB.size + len(payload) + L.BLOB_ALIGN - 1) // L.BLOB_ALIGN * L.BLOB_ALIGN
        with self._side_lock:
            room = self._side_size - self._side_head % self._side_size
            if room < need:
                self._side_head += room
            position = self._side_head + 1
            at = self._side_at + self._side_head % self._side_size
            # The head moves first, so that readers treat the old blobs here as dead before they are
            # overwritten.
            self._side_head += need
            self.side_floor = max(0, self._side_head - self._side_size // 2)
            self.word(L.SIDE_HEAD, self._side_head)
            self._map[at + L.BLOB.size : at + L.BLOB.size + len(payload)] = payload
            self._map[at : at + L.BLOB.size] = L.BLOB.pack(
                len(payload), L.blob_crc(position, payload), position
            )
        return position

    # --- evidence

    def write_evidence(self, threads: list[dict[str, Any]], now: int) -> None:
        """Store the threads' stacks in the older slot."""
        while True:
            payload = json.dumps(
                {"threads": threads}, separators=(",", ":"), ensure_ascii=False
            ).encode("utf-8", "replace")
            if len(payload) <= L.EVIDENCE_SLOT - L.EVIDENCE.size:
                break
            threads = threads[: len(threads) // 2]  # the main thread comes first
        self._evidence_seq += 1
        at = self._evidence_at + self._evidence_seq % 2 * L.EVIDENCE_SLOT
        self._map[at + L.EVIDENCE.size : at + L.EVIDENCE.size + len(payload)] = payload
        self._map[at : at + L.EVIDENCE.size] = L.EVIDENCE.pack(
            len(payload), _crc32(payload), self._evidence_seq, now
        )
        self.word(L.EVIDENCE_SEQ, self._evidence_seq)


def _fitting_json(about: dict[str, Any], limit: int) -> bytes:
    about = dict(about)
    while True:
        text = json.dumps(about, separators=(",", ":")).encode()
        if len(text) <= limit or not about:
            return text[:limit]
        longest = max(about, key=lambda key: len(json.dumps(about[key])))
        del about[longest]
