"""A rank's announcement board: what it is about to issue, for its peers on the node to read before they issue theirs.

One file per rank beside its black box, allocated whole when it is made. Standard library only. All numbers are little-endian.

    header     4096 bytes: who wrote it, and live words
    channels   slots of SLOT_SIZE bytes: a key, then a ring of ENTRIES announcements, and the newest number
    blobs      an append-only ring of JSON objects: what was asked, and where in the program

A number has its round in the high bits: what was refused on all ranks may be tried again under the same number, and must not be
compared with the first attempt of a rank that has not raised yet.

An announcement is written before it is referred to, and carries a check over its words: a reader that meets one being written
reads again. x86's order of stores is relied upon, as everywhere that Python shares memory; on other processors the check alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import Any, Final

MAGIC: Final = 0x31445242534C4D43  # "CMLSBRD1"
HEADER_SIZE: Final = 4096
CHANNELS: Final = 512
ENTRIES: Final = 16
ENTRY: Final = struct.Struct("<QQQQQ")  # number, signature, blob position, reduce op's code + 1, check
SLOT_HEAD: Final = struct.Struct("<QQ")  # key, blob position of the channel's description
LAST_AT: Final = SLOT_HEAD.size + ENTRIES * ENTRY.size  # u64 in a slot: the newest number
SLOT_SIZE: Final = 1024
BLOBS_AT: Final = HEADER_SIZE + CHANNELS * SLOT_SIZE
BLOBS_SIZE: Final = 512 * 1024
SIZE: Final = BLOBS_AT + BLOBS_SIZE
SUFFIX: Final = ".board"
ROUND_SHIFT: Final = 48
NUMBER_MASK: Final = (1 << ROUND_SHIFT) - 1

STATIC: Final = struct.Struct("<QQqQ")  # magic, pid, rank, start ticks
WORD_SIZE: Final = 8
USED: Final = 64  # channel slots in use
HEAD: Final = 72  # bytes ever written to the blobs
WAITING: Final = 80  # key of the channel whose members this rank waits for before issue; 0: none
WAITING_NUMBER: Final = 88
WAITING_SINCE: Final = 96  # CLOCK_MONOTONIC ns
THREADS: Final = 104  # threads that have issued collectives
CLOSED: Final = 112  # 1: the rank has said goodbye
ACTIVE: Final = 120  # 1: it announces all that it issues; 0: it is outside of its `commlens.verify()`
PRESENT: Final = 128  # to which meeting, where verification begins for all, it has come: the first, the second ...
ALONE: Final = 152  # 1: the others did not come to the last one, and it verifies without them
STEADY: Final = 144  # 1: it verifies from its first collective to its last
COUNTS_FROM: Final = 136  # 0: it counts collectives since its first group was made; 1: since it was switched on, later
BLOB: Final = struct.Struct("<IIQ")  # length, CRC-32, position
BLOB_MAX: Final = 32 * 1024
_MASK: Final = (1 << 64) - 1

_pack_entry = ENTRY.pack_into
_unpack_entry = ENTRY.unpack_from


def key_of(*parts: Any) -> int:
    """A channel's identity as a number that all its ranks compute alike; never 0."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") or 1


class Board:
    """The board of this rank: written here, read by the others."""

    def __init__(self, path: Path, rank: int, start_ticks: int) -> None:
        """Make the file.

        Raises:
            OSError: no room, no permission, or it exists.
        """
        self.path = path
        building = path.with_suffix(".making")
        descriptor = os.open(building, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)
            self.map = mmap.mmap(descriptor, SIZE)
            self._words = memoryview(self.map).cast("Q")
            STATIC.pack_into(self.map, 0, MAGIC, os.getpid(), rank, start_ticks)
            building.rename(path)
        except BaseException:
            building.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._used = 0
        self._head = 0

    def word(self, offset: int, value: int) -> None:
        """Write a live word, in one store."""
        self._words[offset // WORD_SIZE] = value

    def add_channel(self, key: int, description: dict[str, Any]) -> int:
        """A slot for a channel: its offset; 0 where there is no room left."""
        position = self.add_blob(description)
        with self._lock:
            if self._used >= CHANNELS:
                return 0
            offset = HEADER_SIZE + self._used * SLOT_SIZE
            SLOT_HEAD.pack_into(self.map, offset, key, position)
            self._used += 1
            self.word(USED, self._used)
        return offset

    def announce(self, slot: int, number: int, signature: int, blob: int, extra: int) -> None:
        """Say what is about to be issued as ``number`` of a channel."""
        at = slot + SLOT_HEAD.size + number % ENTRIES * ENTRY.size
        _pack_entry(self.map, at, number, signature, blob, extra, (number ^ signature ^ blob ^ extra ^ MAGIC) & _MASK)
        self._words[(slot + LAST_AT) // WORD_SIZE] = number

    def withdraw(self, slot: int, number: int) -> None:
        """Unsay it: it was not issued."""
        at = slot + SLOT_HEAD.size + number % ENTRIES * ENTRY.size
        if _unpack_entry(self.map, at)[0] == number:
            _pack_entry(self.map, at, 0, 0, 0, 0, 0)
            self._words[(slot + LAST_AT) // WORD_SIZE] = number - 1

    def waits(self, key: int, number: int, since: int) -> None:
        """Say (or, with key 0, unsay) for what this rank waits."""
        self.word(WAITING_SINCE, since)
        self.word(WAITING_NUMBER, number)
        self.word(WAITING, key)

    def is_alive(self, position: int) -> bool:
        """Whether a blob may still be referred to: half of the ring has not been written since."""
        return position > self._head - BLOBS_SIZE // 2

    def add_blob(self, content: dict[str, Any]) -> int:
        """Append a JSON object: its position, 0 where it is too large."""
        payload = json.dumps(content, separators=(",", ":")).encode()
        if len(payload) > BLOB_MAX:
            return 0
        need = (BLOB.size + len(payload) + 7) // 8 * 8
        with self._lock:
            room = BLOBS_SIZE - self._head % BLOBS_SIZE
            if room < need:
                self._head += room
            position = self._head + 1
            at = BLOBS_AT + self._head % BLOBS_SIZE
            self._head += need
            self.word(HEAD, self._head)
            self.map[at + BLOB.size : at + BLOB.size + len(payload)] = payload
            BLOB.pack_into(self.map, at, len(payload), zlib.crc32(payload, position & 0xFFFFFFFF), position)
        return position

    def close(self) -> None:
        """Say goodbye, and take the file away: peers that have it mapped still see that."""
        self.word(CLOSED, 1)
        with contextlib.suppress(OSError):
            self.path.unlink()


class PeerBoard:
    """Another rank's board, read only. Nothing that it says is trusted further than its checks."""

    def __init__(self, path: Path) -> None:
        """Map it.

        Raises:
            OSError, ValueError: it cannot be read, or is no board.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size != SIZE:
                raise ValueError(f"{path} is not a board")
            self.map = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
            self._words = memoryview(self.map).cast("Q")
        finally:
            os.close(descriptor)
        magic, self.pid, self.rank, self.start_ticks = STATIC.unpack_from(self.map, 0)
        if magic != MAGIC:
            raise ValueError(f"{path} is not a board")
        self._slots: dict[int, int] = {}
        self._seen = 0
        self._blobs: dict[int, dict[str, Any] | None] = {}

    def slot(self, key: int) -> int:
        """The offset of a channel's slot; 0 where this rank has not used it yet."""
        found = self._slots.get(key, 0)
        if found:
            return found
        used = self._words[USED // WORD_SIZE]
        while self._seen < min(used, CHANNELS):
            offset = HEADER_SIZE + self._seen * SLOT_SIZE
            self._slots[SLOT_HEAD.unpack_from(self.map, offset)[0]] = offset
            self._seen += 1
        return self._slots.get(key, 0)

    def announced(self, slot: int, number: int) -> tuple[int, int, int] | None:
        """``(signature, blob, extra)`` of an announcement; None while it is not there (or has long been overwritten)."""
        at = slot + SLOT_HEAD.size + number % ENTRIES * ENTRY.size
        own, signature, blob, extra, check = _unpack_entry(self.map, at)
        if own != number or check != (own ^ signature ^ blob ^ extra ^ MAGIC) & _MASK:
            return None
        return signature, blob, extra

    def is_past(self, slot: int, number: int) -> bool:
        """Whether it has announced a later number of the same round, so that this one was announced before."""
        last = self.last_number(slot)
        return last > number and last >> ROUND_SHIFT == number >> ROUND_SHIFT

    def last_number(self, slot: int) -> int:
        """The newest number that it announced there; 0 for none."""
        return self._words[(slot + LAST_AT) // WORD_SIZE]

    def word(self, offset: int) -> int:
        """A live word."""
        return self._words[offset // WORD_SIZE]

    def channels(self) -> list[tuple[int, dict[str, Any]]]:
        """All that it has used: keys and descriptions."""
        self.slot(0)
        return [(key, description) for key in self._slots if (description := self.channel(key)) is not None]

    def channel(self, key: int) -> dict[str, Any] | None:
        """The description of a channel."""
        slot = self.slot(key)
        return self.blob(SLOT_HEAD.unpack_from(self.map, slot)[1]) if slot else None

    def blob(self, position: int) -> dict[str, Any] | None:
        """A JSON object; None where it is gone or damaged."""
        if position not in self._blobs:
            if len(self._blobs) > 4096:
                self._blobs.clear()
            self._blobs[position] = self._read(position)
        return self._blobs[position]

    def _read(self, position: int) -> dict[str, Any] | None:
        if position <= 0 or (position - 1) % 8:
            return None
        at = BLOBS_AT + (position - 1) % BLOBS_SIZE
        if at + BLOB.size > SIZE:
            return None
        length, crc, own = BLOB.unpack_from(self.map, at)
        if own != position or length > BLOB_MAX or at + BLOB.size + length > SIZE:
            return None
        payload = self.map[at + BLOB.size : at + BLOB.size + length]
        if crc != zlib.crc32(payload, position & 0xFFFFFFFF):
            return None
        try:
            content = json.loads(payload)
        except ValueError:
            return None
        return content if isinstance(content, dict) else None
