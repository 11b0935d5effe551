"""The job's alarms on this node: what somebody found wrong, for everybody to raise in the same words. Standard library only.

One file beside the boxes, which only grows. Whoever finds a disagreement posts it under a lock; the first to post about a
collective is quoted by all. A rank looks at one word before each of its collectives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import Any, Final

NAME: Final = "verify.alarms"
_COUNT, _CHANGES, _END = range(3)  # words: how many alarms; how often a board was made; bytes of alarms
_HEADER_SIZE: Final = 4096
_RECORD: Final = struct.Struct("<II")  # length, CRC-32 of the JSON text that follows
_SIZE: Final = _HEADER_SIZE + 508 * 1024
_LONGEST: Final = 32 * 1024  # of a text, in characters


class Alarms:
    """The file, made by whoever comes first."""

    def __init__(self, folder: Path) -> None:
        """Open it.

        Raises:
            OSError: no room, or no permission.
        """
        self.path = folder / NAME
        self._lock = threading.RLock()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with self._locked():
                if os.fstat(self._descriptor).st_size < _SIZE:
                    os.posix_fallocate(self._descriptor, 0, _SIZE)
            self.map = mmap.mmap(self._descriptor, _SIZE)  # of its first page, bells.py uses what is left
            self._words = memoryview(self.map)[:_HEADER_SIZE].cast("Q")
        except BaseException:
            os.close(self._descriptor)
            raise
        self._read: list[dict[str, Any]] = []
        self._read_to = 0

    def count(self) -> int:
        """How many there are."""
        return self._words[_COUNT]

    def read(self, index: int) -> dict[str, Any]:
        """One of them, from 0; empty where it is damaged."""
        with self._lock:
            while len(self._read) <= index:
                at = _HEADER_SIZE + self._read_to
                if at + _RECORD.size > _SIZE:
                    return {}
                length, crc = _RECORD.unpack_from(self.map, at)
                self._read_to += _RECORD.size + length
                self._read.append(_decoded(self.map[at + _RECORD.size : at + _RECORD.size + length], crc))
            return self._read[index]

    def post(self, key: int, number: int, content: dict[str, Any]) -> dict[str, Any]:
        """Post about collective ``number`` of channel ``key``; what was posted about it before wins, and is returned.

        Where there is no room left, the others do not learn of it, and wait as long as they would without this rank.
        """
        with self._locked():
            count = self.count()
            for index in range(count):
                earlier = self.read(index)
                if (earlier.get("key"), earlier.get("number")) == (key, number):
                    return earlier
            content = {**content, "text": str(content["text"])[:_LONGEST], "key": key, "number": number}
            payload = json.dumps(content, separators=(",", ":")).encode()
            end = self._words[_END]
            at = _HEADER_SIZE + end
            if at + _RECORD.size + len(payload) <= _SIZE:
                _RECORD.pack_into(self.map, at, len(payload), zlib.crc32(payload))
                self.map[at + _RECORD.size : at + _RECORD.size + len(payload)] = payload
                self._words[_END] = end + _RECORD.size + len(payload)
                self._words[_COUNT] = count + 1
        return content

    def changes(self) -> int:
        """How often a rank has made its board: whoever misses some looks again when this has grown."""
        return self._words[_CHANGES]

    def tell_change(self) -> None:
        """A board was made."""
        with self._locked():
            self._words[_CHANGES] += 1

    def close(self) -> None:
        """Let go of the file; the last rank's box folder takes it away."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Any:
        with self._lock:  # for threads, which share the descriptor
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _decoded(payload: bytes, crc: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if zlib.crc32(payload) == crc:
            content = json.loads(payload)
            return content if isinstance(content, dict) else {}
    return {}
