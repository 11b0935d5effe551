"""The log of refused collectives of a job on one node, so that all ranks raise the same message.
Standard library only.

One append-only file beside the black boxes. The rank that finds a mismatch posts it under a lock;
all ranks quote the first post about a collective. Before each of its collectives, a rank checks one
word.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import Any, Final

NAME: Final = "verify.alarms"
DRAFTS: Final = "verify.drafts"
"""The log of refusals that also concern other nodes, until they are posted on all nodes."""
CONNECTING, LINKED, ALONE = range(3)
"""States of the link to the other nodes."""
_COUNT, _BOARDS, _END, _LINK, _SHARED = range(5)
"""Words: number of refusals; number of boards created; bytes of refusals; state of the link; number
of refusals that all nodes have.
"""
_HEADER_SIZE: Final = 4096
_RECORD: Final = struct.Struct("<II")  # length, CRC-32 of the JSON text that follows
_SIZE: Final = _HEADER_SIZE + 508 * 1024
_TEXT_MAX: Final = 32 * 1024  # characters


class RefusalLog:
    """The log, a file that the first rank creates."""

    def __init__(self, folder: Path, name: str = NAME) -> None:
        """Open or create the file.

        Raises:
            OSError: there is no space or no permission.
        """
        self.path = folder / name
        self._lock = threading.RLock()
        self._descriptor = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            with self.locked():
                if os.fstat(self._descriptor).st_size < _SIZE:
                    os.posix_fallocate(self._descriptor, 0, _SIZE)
            # wakeup.py uses the rest of the first page
            self.map = mmap.mmap(self._descriptor, _SIZE)
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
                self._read.append(
                    _decoded(self.map[at + _RECORD.size : at + _RECORD.size + length], crc)
                )
            return self._read[index]

    def post(self, key: int, number: int, content: dict[str, Any]) -> dict[str, Any]:
        """Post a refusal of collective ``number`` of channel ``key``, and return the first one
        posted about it.

        Each node stamps it with its own time, ``posted_ns`` in ``CLOCK_MONOTONIC`` ns.
        If the file is full, the other ranks do not learn of it and wait until their own timeout.
        """
        with self.locked():
            count = self.count()
            for index in range(count):
                earlier = self.read(index)
                if (earlier.get("key"), earlier.get("number")) == (key, number):
                    return earlier
            content = {
                **content,
                "text": str(content["text"])[:_TEXT_MAX],
                "key": key,
                "number": number,
                "posted_ns": time.monotonic_ns(),
            }
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
        """Return how many boards were created. When this number grows, a rank that lacks a peer's
        board looks for it again.
        """
        return self._words[_BOARDS]

    def count_board(self) -> None:
        """Count a board that was created."""
        with self.locked():
            self._words[_BOARDS] += 1

    def close(self) -> None:
        """Close the file. It is removed with the job's folder, by the last rank."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    @property
    def link(self) -> int:
        """The state of the link to the other nodes."""
        return self._words[_LINK]

    @link.setter
    def link(self, state: int) -> None:
        self._words[_LINK] = state

    @property
    def shared(self) -> int:
        """The number of refusals that were posted on all nodes, in the same order on each."""
        return self._words[_SHARED]

    def post_shared(self, key: int, number: int, content: dict[str, Any]) -> None:
        """Post a refusal that the relays post on all nodes, and count it."""
        self.post(key, number, content)
        self._words[_SHARED] += 1

    def reset(self) -> None:
        """Delete all refusals and counts, for a new start of the job: the ranks that wrote them
        have ended. The caller holds :meth:`locked`.
        """
        for word in range(_HEADER_SIZE // 8):
            self._words[word] = 0
        self._read, self._read_to = [], 0

    @contextlib.contextmanager
    def locked(self) -> Any:
        """Hold the lock that all ranks of the node share."""
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
