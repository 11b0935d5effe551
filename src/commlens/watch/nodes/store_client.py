"""A client of the job's TCPStore: torch's wire protocol, without torch, which would cost the
watcher 200 MB and 1.5 s of CPU.

Tried with both servers of torch 2.13 (``tests/unit/watch/nodes/test_store_client.py``). With
another protocol the calls fail, and each node gives its own verdict. The client has a connection of
its own, so no client of the job ever waits for it. Every call has a timeout.

For each new connection, torch's server looks up the client's name in DNS, in the only thread that
answers all clients. Where DNS is slow, that takes seconds. So a client must not answer a slow store
with a new connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final

_VALIDATE, _SET, _GET, _ADD, _CHECK, _WAIT, _DELETE = 0, 1, 3, 4, 5, 6, 8
_MAGIC: Final = 0x3C85F7CE
_SIZE: Final = struct.Struct("=Q")
_NUMBER: Final = struct.Struct("=q")
_READY: Final = 0
_OPTIONS: Final = {
    socket.TCP_NODELAY: 1,
    # seconds without data, after which this machine asks the other whether it is there
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    # milliseconds without an answer, after which the connection is closed
    socket.TCP_USER_TIMEOUT: 3000,
}
# bytes to receive at once: a call for each of a thousand values costs the reporter much
_RECEIVE: Final = 1 << 16
# requests under way at once: if we hang up, torch's server prints a warning for each answer that it
# cannot send
_BATCH: Final = 16
VALUE_MAX: Final = 1 << 30
"""Longest value that is read, in bytes; a larger size means that the other side is no store."""
KeepWaiting = Callable[[float], bool]


class StoreClient:
    """A connection to a TCPStore.

    All methods raise OSError if the store cannot be reached, closes the connection, or does not
    answer in time; the connection is then useless. A store whose machine no longer answers counts
    as closed within a few seconds.

    Args:
        host: name or address.
        port: TCP port.
        timeout_s: for connecting.
        answer_s: for each answer; ``timeout_s`` if it is None.
        keep_waiting: gets the seconds waited so far for an answer, and returns whether to wait
            ``answer_s`` longer; None: never.
        within: begins all keys.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 1.0,
        answer_s: float | None = None,
        keep_waiting: KeepWaiting | None = None,
        within: str = "",
    ) -> None:
        self._within = within
        self._socket = socket.create_connection((host, port), timeout_s)
        self._answer_s = timeout_s if answer_s is None else answer_s
        self._keep_waiting = keep_waiting or (lambda waited_s: False)
        # a value to store, which is sent with the next request: a second packet costs the store as
        # much
        self._unsent: list[bytes] = []
        self._received = bytearray()  # and not read yet
        self._socket.settimeout(self._answer_s)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._send(bytes([_VALIDATE]), struct.pack("=I", _MAGIC))

    def set(self, key: str, value: bytes) -> None:
        """Store a value: with the next call that gets an answer, or when the connection is closed.
        An error shows only then.
        """
        self._unsent += [bytes([_SET]), self._text(key), _SIZE.pack(len(value)), value]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0. Returns the sum."""
        self._send(bytes([_ADD]), self._text(key), _NUMBER.pack(amount))
        return int(_NUMBER.unpack(self._receive(_NUMBER.size))[0])

    def existing_keys(self, keys: Sequence[str]) -> list[str]:
        """Return those of these keys that exist. Never waits for the others."""
        found: list[str] = []
        for some in _batches(keys):
            self._send(*(bytes([_CHECK]) + _SIZE.pack(1) + self._text(key) for key in some))
            answers = self._receive(len(some))
            found += [key for key, answer in zip(some, answers, strict=True) if answer == _READY]
        return found

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist. A key that does not exist may break the connection:
        see :meth:`existing_keys`.
        """
        if not keys:
            self._send()
        values: list[bytes] = []
        for some in _batches(keys):
            self._send(*(bytes([_GET]) + self._text(key) for key in some))
            values += [self._value() for _ in some]
        return values

    def wait_for(self, key: str, timeout_s: float, wake_fd: int) -> bool:
        """Wait until a key is set, and delete it. The wait costs the store nothing.

        Args:
            key: no other client waits for it.
            timeout_s: how long to wait at most.
            wake_fd: descriptor that ends the wait once it can be read.

        Returns:
            Whether another client has set the key.
        """
        self._send(bytes([_WAIT]), _SIZE.pack(1), self._text(key))
        events = select.poll()
        for descriptor in (self._socket.fileno(), wake_fd):
            events.register(descriptor, select.POLLIN)
        answered = self._socket.fileno() in dict(events.poll(1000 * timeout_s))
        if not answered:
            self.set(key, b"")  # the store then answers the request
        self._send(bytes([_DELETE]), self._text(key))
        self._receive(1 + _NUMBER.size)
        return answered

    def remove(self) -> None:
        """Do nothing: the values end with the job's store."""

    def close(self) -> None:
        """Send what is left to store, and close the connection."""
        with self._socket, contextlib.suppress(OSError):
            self._send()

    def _text(self, key: str) -> bytes:
        encoded = f"/{self._within}{key}".encode()  # torch puts all its keys below "/"
        return _SIZE.pack(len(encoded)) + encoded

    def _value(self) -> bytes:
        (size,) = _SIZE.unpack(self._receive(_SIZE.size))
        if size > VALUE_MAX:
            raise ConnectionError(f"the store answered with a value of {size} bytes")
        return self._receive(size)

    def _send(self, *parts: bytes) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent or parts:
            self._socket.sendall(b"".join([*unsent, *parts]))

    def _receive(self, size: int) -> bytes:
        waited_s = 0.0
        while (left := size - len(self._received)) > 0:
            try:
                received = self._socket.recv(max(left, _RECEIVE))
            except TimeoutError:
                waited_s += self._answer_s
                if not self._keep_waiting(waited_s):
                    raise
                continue
            if not received:
                raise ConnectionError("the store closed the connection")
            self._received += received
        content = bytes(self._received[:size])
        del self._received[:size]
        return content


def _batches(keys: Sequence[str]) -> list[Sequence[str]]:
    """Return keys for one round trip each."""
    return [keys[at : at + _BATCH] for at in range(0, len(keys), _BATCH)]
