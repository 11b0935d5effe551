"""A connection between the relays of two nodes: frames, and proof that both know the job's secret.
Standard library only.

A frame is its length, a letter, and its content: ``W``, changed bytes of boards, or ``J``, a JSON
object. Any other frame is refused, and before the other side has proven that it knows the secret,
so is any but a short object.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

_HEAD: Final = struct.Struct("<Ic")
_WRITE: Final = struct.Struct("<III")  # rank, offset, length
_FRAME_MAX: Final = 64 << 20
_FIRST_FRAME_MAX: Final = 4096
_BACKLOG_MAX: Final = 256 << 20  # bytes that the other side has not taken
_CHUNK: Final = 1 << 18
WRITES: Final = b"W"
JSON: Final = b"J"

Change = tuple[int, int, bytes]
"""Rank, offset in its board, and the bytes there."""


def pack_writes(changes: Iterable[Change]) -> bytes:
    """Return the content of a frame of changes."""
    return b"".join(
        part
        for rank, offset, data in changes
        for part in (_WRITE.pack(rank, offset, len(data)), data)
    )


def unpack_writes(content: bytes) -> Iterator[Change]:
    """Yield the changes of a frame.

    Raises:
        ValueError: it is damaged.
    """
    at = 0
    while at < len(content):
        if at + _WRITE.size > len(content):
            raise ValueError("a frame that ends early")
        rank, offset, length = _WRITE.unpack_from(content, at)
        at += _WRITE.size
        if at + length > len(content):
            raise ValueError("a frame that ends early")
        yield rank, offset, content[at : at + length]
        at += length


def proof(secret: str, nonce: str, side: str) -> str:
    """Return the answer to a nonce that only a side which knows the secret can give."""
    return hmac.new(secret.encode(), f"{side} {nonce}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, secret: str, nonce: str, side: str) -> bool:
    """Return whether this is the other side's proof."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), proof(secret, nonce, side).encode()
    )


class Connection:
    """A socket that never blocks. Its methods raise OSError or ValueError if the other side is gone
    or sends nonsense.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.nonce = secrets.token_hex(16)
        self.trusted = False
        self.host = ""
        self.ranks: set[int] = set()  # of the other node, or of all nodes behind it
        self.heard = time.monotonic()
        self.is_leaving = False  # the other side has said goodbye
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self.socket.fileno()

    def send(self, kind: bytes, content: bytes) -> None:
        """Send a frame, as much of it as the other side takes now."""
        self._out += _HEAD.pack(len(content), kind) + content
        self.flush()
        if len(self._out) > _BACKLOG_MAX:
            raise ConnectionError("it takes nothing")

    def send_json(self, **content: Any) -> None:
        """Send an object."""
        self.send(JSON, json.dumps(content).encode())

    def flush(self) -> None:
        """Send more of the bytes that the other side has not taken, if there are any."""
        if self._out:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                del self._out[: self.socket.send(self._out)]

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frames that have arrived: kind and content."""
        some = None
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while some is None or len(some) == _CHUNK:
                some = self.socket.recv(_CHUNK)
                self._in += some
                self.heard = time.monotonic()
        yield from self._frames()
        if some == b"":
            raise ConnectionError("it closed the connection")

    def _frames(self) -> Iterator[tuple[bytes, bytes]]:
        while len(self._in) >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._in)
            if kind not in (WRITES, JSON) or size > (
                _FRAME_MAX if self.trusted else _FIRST_FRAME_MAX
            ):
                raise ValueError("it is no relay")
            if len(self._in) < _HEAD.size + size:
                return
            content = bytes(self._in[_HEAD.size : _HEAD.size + size])
            del self._in[: _HEAD.size + size]
            yield kind, content

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
