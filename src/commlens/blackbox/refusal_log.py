"""The log of refused collectives of a job on one node, so that all ranks raise the same message. Standard library only.

One append-only file beside the black boxes. The rank that finds a mismatch posts it under a lock; all ranks quote the first post about a
collective. Before each of its collectives, a rank checks one word.
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
_COUNT, _BOARDS, _END = range(3)  # words: number of refusals; number of boards created; bytes of refusals
_HEADER_SIZE: Final = 4096
_RECORD: Final = struct.Struct("<II")  # length, CRC-32 of the JSON text that follows
_SIZE: Final = _HEADER_SIZE + 508 * 1024
_LONGEST: Final = 32 * 1024  # of a text, in characters


class RefusalLog:
    """The file; the first rank creates it."""

    def __init__(self, folder: Path) -> None:
        """Open or create the file.

        Raises:
            OSError: there is no space or no permission.
        """
        self.path = folder / NAME
        self._lock = threading.RLock()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with self._locked():
                if os.fstat(self._descriptor).st_size < _SIZE:
                    os.posix_fallocate(self._descriptor, 0, _SIZE)
            self.map = mmap.mmap(self._descriptor, _SIZE)  # wakeup.py uses the rest of the first page
            self._words = memoryview(self.map)[:_HEADER_SIZE].cast("Q")
        except BaseException:
            os.close(self._descriptor)
            raise
        self._read: list[dict[str, Any]] = []
        self._read_to = 0

    def count(self) -> int:
        """Return the number of refusals."""
        return self._words[_COUNT]

    def read(self, index: int) -> dict[str, Any]:
        """Return a refusal by its index, from 0; an empty one if it is damaged."""
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
        """Post a refusal of collective ``number`` of channel ``key``, and return the first one posted about it.

        If the file is full, the other ranks do not learn of it and wait until their own timeout.
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

    def boards_created(self) -> int:
        """Return how many boards were created. A rank that misses peers looks for their boards when this has grown."""
        return self._words[_BOARDS]

    def count_board(self) -> None:
        """Count a board that was created."""
        with self._locked():
            self._words[_BOARDS] += 1

    def close(self) -> None:
        """Close the file. It is removed with the job's folder, by the last rank."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Any:
        with self._lock:  # threads share the descriptor, and so the file lock
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
