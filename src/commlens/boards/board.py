"""A rank's announcement board: the collectives that it is about to issue, for its peers on the node
to read before they issue theirs.

One file per rank beside its black box, allocated in full when it is created. Standard library only.
All numbers are little-endian.

    header     4096 bytes: the writer's identity, and live words
    channels   slots of SLOT_SIZE bytes: a key, a ring of ENTRIES announcements, the newest number
    blobs      a ring buffer of JSON objects: a collective's arguments and the line that issues it

The high bits of an announcement's number hold its round. A collective that all ranks refused may be
tried again under the same sequence number; the round keeps it from being compared with the first
attempt of a rank that has not raised yet.

An announcement is written before any word refers to it, and ends with a check word over its other
words: a reader that finds it half written reads it again. This relies on x86's order of stores, as
all memory that Python shares does; on other processors only the check word protects the reader.
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
# number, signature, blob position, reduce op's code + 1, check
ENTRY: Final = struct.Struct("<QQQQQ")
SLOT_HEAD: Final = struct.Struct("<QQ")  # key, blob position of the channel's description
# offset in a slot of a u64: the newest number
LAST_AT: Final = SLOT_HEAD.size + ENTRIES * ENTRY.size
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
HEAD: Final = 72  # bytes of blobs written so far
WAITING: Final = 80  # key of the channel whose members this rank waits for; 0: none
WAITING_NUMBER: Final = 88
WAITING_SINCE: Final = 96  # CLOCK_MONOTONIC ns
THREADS: Final = 104  # threads that have issued collectives
CLOSED: Final = 112  # 1: the rank has finished
ACTIVE: Final = 120  # 1: it announces every collective; 0: it is outside its `commlens.verify()`
PRESENT: Final = 128  # number of the newest rendezvous that it has reached, from 1
# 0: it numbers collectives from its first group on; 1: from where it was enabled in mid-job
COUNTS_FROM: Final = 136
STEADY: Final = 144  # 1: it verifies from its first collective to its last
ALONE: Final = 152  # 1: it left the last rendezvous without all others, and verifies without them
# a rank whose whereabouts this rank asks for, plus 1; the upper half counts the questions
ASKS: Final = 160
REMOTE: Final = 168  # not 0: a copy of a board on another node; LINKED or LOST
HEARD: Final = 176  # of a copy: CLOCK_MONOTONIC ns of the last sign of life of the other node
ENDED: Final = 184  # of a copy: 1: the rank's process has ended without closing its board
ANY_SOURCE: Final = 192  # 1: it has received from any rank; such receives are not announced
ANSWER_AT: Final = 512  # of a copy: the answer to the last question about its rank's whereabouts
# its question, as in ASKS; the length of the text that follows
ANSWER: Final = struct.Struct("<QQ")
ANSWER_MAX: Final = 512
LINKED: Final = 1
LOST: Final = 2  # the other node is no longer heard of
BLOB: Final = struct.Struct("<IIQ")  # length, CRC-32, position
BLOB_MAX: Final = 32 * 1024
_MASK: Final = (1 << 64) - 1

_pack_entry = ENTRY.pack_into
_unpack_entry = ENTRY.unpack_from


def key_of(*parts: Any) -> int:
    """Return a channel's identity, a number that is the same on all its ranks and never 0."""
    return (
        int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") or 1
    )


def allocate(path: Path, rank: int, start_ticks: int) -> mmap.mmap:
    """Create the file of an empty board that this process writes, and return its map.

    Raises:
        OSError: there is no space, no permission, or the file exists.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
        mapped = mmap.mmap(descriptor, SIZE)
        STATIC.pack_into(mapped, 0, MAGIC, os.getpid(), rank, start_ticks)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return mapped


class Board:
    """This rank's own board: written here, read by its peers."""

    def __init__(self, path: Path, rank: int, start_ticks: int) -> None:
        """Create the file.

        Raises:
            OSError: there is no space, no permission, or the file exists.
        """
        self.path = path
        building = path.with_suffix(".making")
        self.map = allocate(building, rank, start_ticks)
        self._words = memoryview(self.map).cast("Q")
        building.rename(path)
        self._lock = threading.Lock()
        self._used = 0
        self._head = 0

    def set_word(self, offset: int, value: int) -> None:
        """Write a live word in one store."""
        self._words[offset // WORD_SIZE] = value

    def add_channel(self, key: int, description: dict[str, Any]) -> int:
        """Allocate a slot for a channel and return its offset; 0 if no slot is left."""
        position = self.add_blob(description)
        with self._lock:
            if self._used >= CHANNELS:
                return 0
            offset = HEADER_SIZE + self._used * SLOT_SIZE
            SLOT_HEAD.pack_into(self.map, offset, key, position)
            self._used += 1
            self.set_word(USED, self._used)
        return offset

    def announce(self, slot: int, number: int, signature: int, blob: int, reduce_code: int) -> None:
        """Announce the collective that is about to be issued as ``number`` of a channel."""
        at = slot + SLOT_HEAD.size + number % ENTRIES * ENTRY.size
        _pack_entry(
            self.map,
            at,
            number,
            signature,
            blob,
            reduce_code,
            (number ^ signature ^ blob ^ reduce_code ^ MAGIC) & _MASK,
        )
        self._words[(slot + LAST_AT) // WORD_SIZE] = number

    def withdraw(self, slot: int, number: int) -> None:
        """Remove an announcement: the collective was not issued."""
        at = slot + SLOT_HEAD.size + number % ENTRIES * ENTRY.size
        if _unpack_entry(self.map, at)[0] == number:
            _pack_entry(self.map, at, 0, 0, 0, 0, 0)
            self._words[(slot + LAST_AT) // WORD_SIZE] = number - 1

    def set_waiting(self, key: int, number: int, since: int) -> None:
        """Publish the collective that this rank waits in; key 0 for none."""
        self.set_word(WAITING_SINCE, since)
        self.set_word(WAITING_NUMBER, number)
        self.set_word(WAITING, key)

    def is_recent(self, position: int) -> bool:
        """Return whether a blob is still safe to refer to: less than half of the ring has been
        written since.
        """
        return position > self._head - BLOBS_SIZE // 2

    def add_blob(self, content: dict[str, Any]) -> int:
        """Append a JSON object and return its position; 0 if it is too large."""
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
            self.set_word(HEAD, self._head)
            self.map[at + BLOB.size : at + BLOB.size + len(payload)] = payload
            BLOB.pack_into(
                self.map, at, len(payload), zlib.crc32(payload, position & 0xFFFFFFFF), position
            )
        return position

    def close(self) -> None:
        """Mark the rank as finished and remove the file. Peers that have it mapped still see the
        mark.
        """
        self.set_word(CLOSED, 1)
        with contextlib.suppress(OSError):
            self.path.unlink()


class PeerBoard:
    """Another rank's board, read only. Its content is trusted only as far as its checks hold."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            OSError, ValueError: it cannot be read, or is not a board.
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
        self.path = path
        self._slots: dict[int, int] = {}
        self._slots_read = 0
        self._blobs: dict[int, dict[str, Any] | None] = {}

    @property
    def is_remote(self) -> bool:
        """Whether this is a copy of a board on another node. Its ``pid`` is then the relay's."""
        return self._words[REMOTE // WORD_SIZE] != 0

    @property
    def answer(self) -> tuple[int, str]:
        """The question about the rank's whereabouts that was answered last, and the answer."""
        question, length = ANSWER.unpack_from(self.map, ANSWER_AT)
        return question, self.map[
            ANSWER_AT + ANSWER.size : ANSWER_AT + ANSWER.size + min(length, ANSWER_MAX)
        ].decode(errors="replace")

    def give_up(self) -> None:
        """Mark a copy as no longer kept, for all ranks of this node: its rank is not waited for."""
        with self.path.open("r+b") as file, mmap.mmap(file.fileno(), HEADER_SIZE) as header:
            words = memoryview(header).cast("Q")
            words[REMOTE // WORD_SIZE], words[ACTIVE // WORD_SIZE] = LOST, 0
            words.release()

    def slot(self, key: int) -> int:
        """Return the offset of a channel's slot; 0 if the rank has not used the channel yet."""
        found = self._slots.get(key, 0)
        if found:
            return found
        used = self._words[USED // WORD_SIZE]
        while self._slots_read < min(used, CHANNELS):
            offset = HEADER_SIZE + self._slots_read * SLOT_SIZE
            self._slots[SLOT_HEAD.unpack_from(self.map, offset)[0]] = offset
            self._slots_read += 1
        return self._slots.get(key, 0)

    def announced(self, slot: int, number: int) -> tuple[int, int, int] | None:
        """Return an announcement's signature, blob position and reduce op's code + 1; None if it
        is not there yet or was overwritten long ago.
        """
        at = slot + SLOT_HEAD.size + number % ENTRIES * ENTRY.size
        own, signature, blob, reduce_code, check = _unpack_entry(self.map, at)
        if own != number or check != (own ^ signature ^ blob ^ reduce_code ^ MAGIC) & _MASK:
            return None
        return signature, blob, reduce_code

    def announced_blob(self, key: int, number: int) -> dict[str, Any] | None:
        """Return the arguments that the rank announced on a channel; None if it has not, or if they
        were overwritten.
        """
        slot = self.slot(key)
        seen = self.announced(slot, number) if slot else None
        return self.blob(seen[1]) if seen is not None else None

    def is_past(self, slot: int, number: int) -> bool:
        """Return whether the rank has announced a later number of the same round, so that it must
        have announced this one.
        """
        last = self.last_number(slot)
        return last > number and last >> ROUND_SHIFT == number >> ROUND_SHIFT

    def last_number(self, slot: int) -> int:
        """Return the newest number announced in a slot; 0 for none."""
        return self._words[(slot + LAST_AT) // WORD_SIZE]

    def word(self, offset: int) -> int:
        """Read a live word."""
        return self._words[offset // WORD_SIZE]

    def channels(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the keys and descriptions of all channels that the rank has used."""
        self.slot(0)
        return [
            (key, description)
            for key in self._slots
            if (description := self.channel(key)) is not None
        ]

    def channel(self, key: int) -> dict[str, Any] | None:
        """Return the description of a channel."""
        slot = self.slot(key)
        return self.blob(SLOT_HEAD.unpack_from(self.map, slot)[1]) if slot else None

    def blob(self, position: int) -> dict[str, Any] | None:
        """Return a JSON object; None if it was overwritten or is damaged."""
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
