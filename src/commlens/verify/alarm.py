"""The job's alarms on this node: what somebody found wrong, for everybody to raise in the same words. Standard library only.

One file beside the boxes. Whoever finds a disagreement posts it under a lock; the first to post about a collective is quoted by
all. A rank looks at one word before each of its collectives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Final

NAME: Final = "verify.alarms"
_COUNT: Final = struct.Struct("<Q")
_CHANGES_AT: Final = 8
_RECORD: Final = struct.Struct("<II")  # length, CRC-32 of the JSON text that follows
_RECORD_SIZE: Final = 16 * 1024
_MOST: Final = 32
_SIZE: Final = 4096 + _MOST * _RECORD_SIZE


class Alarms:
    """The file, made by whoever comes first."""

    def __init__(self, folder: Path) -> None:
        """Open it.

        Raises:
            OSError: no room, or no permission.
        """
        self.path = folder / NAME
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with self._locked():
                if os.fstat(self._descriptor).st_size < _SIZE:
                    os.posix_fallocate(self._descriptor, 0, _SIZE)
            self._map = mmap.mmap(self._descriptor, _SIZE)
        except BaseException:
            os.close(self._descriptor)
            raise

    def count(self) -> int:
        """How many there are."""
        number: int = _COUNT.unpack_from(self._map, 0)[0]
        return min(number, _MOST)

    def read(self, index: int) -> dict[str, Any]:
        """One of them; empty where it is damaged."""
        at = 4096 + index * _RECORD_SIZE
        length, crc = _RECORD.unpack_from(self._map, at)
        payload = self._map[at + _RECORD.size : at + _RECORD.size + min(length, _RECORD_SIZE - _RECORD.size)]
        with contextlib.suppress(ValueError):
            if zlib.crc32(payload) == crc:
                content = json.loads(payload)
                return content if isinstance(content, dict) else {}
        return {}

    def post(self, key: int, number: int, content: dict[str, Any]) -> dict[str, Any]:
        """Post about collective ``number`` of channel ``key``; what was posted about it before wins, and is returned."""
        with self._locked():
            count = self.count()
            for index in range(count):
                earlier = self.read(index)
                if (earlier.get("key"), earlier.get("number")) == (key, number):
                    return earlier
            content = {**content, "key": key, "number": number}
            payload = json.dumps(content, separators=(",", ":")).encode()
            if count < _MOST and len(payload) <= _RECORD_SIZE - _RECORD.size:
                at = 4096 + count * _RECORD_SIZE
                _RECORD.pack_into(self._map, at, len(payload), zlib.crc32(payload))
                self._map[at + _RECORD.size : at + _RECORD.size + len(payload)] = payload
                _COUNT.pack_into(self._map, 0, count + 1)
        return content

    def changes(self) -> int:
        """How often a rank has made its board: whoever misses some looks again when this has grown."""
        number: int = _COUNT.unpack_from(self._map, _CHANGES_AT)[0]
        return number

    def tell_change(self) -> None:
        """A board was made."""
        with self._locked():
            _COUNT.pack_into(self._map, _CHANGES_AT, self.changes() + 1)

    def close(self) -> None:
        """Let go of the file; the last rank's box folder takes it away."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Any:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
