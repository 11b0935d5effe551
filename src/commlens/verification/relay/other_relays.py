"""The connections of a node's relay to the other relays: how they meet, prove themselves, and are
lost. ``node_relay.py`` says what they send.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from commlens.verification.relay.connection import JSON, WRITES, Connection, is_proof, proof

BEAT_S: Final = 0.5
LOST_S: Final = 5.0
_RETRY_S: Final = 0.3
_HANDSHAKE_S: Final = 5.0
_STRANGERS: Final = 256  # connections that have not proven themselves


class OtherRelays:
    """The connections to the other relays: at the hub to all of them, else to the hub.

    Args:
        world_size: number of ranks of the job.
        is_hub: rank 0 is on this node.
        on_joined: is called with a connection once its relay has proven itself.
        on_message: is called with such a connection and an object that it sent.
        on_changes: is called with such a connection and changed bytes of boards that it sent.
        on_lost: is called with a connection that has ended, and why.
    """

    def __init__(
        self,
        world_size: int,
        *,
        is_hub: bool,
        on_joined: Callable[[Connection], None],
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_changes: Callable[[Connection, bytes], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        self._world_size = world_size
        self._is_hub = is_hub
        self._on_joined = on_joined
        self._on_message = on_message
        self._on_changes = on_changes
        self._on_lost = on_lost
        self.connections: list[Connection] = []
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None
        self._secret = ""
        self._addresses: list[tuple[str, int]] = []  # of the hub, in the order to try them
        self._retry_at = 0.0
        self._beat_at = 0.0

    # --- the two ways to meet

    def listen(self, address: str) -> dict[str, Any]:
        """Wait for the other relays. Returns what they need to know."""
        self._server = socket.create_server(
            (address, 0), backlog=128, family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._secret = secrets.token_hex(16)
        return {"port": self._server.getsockname()[1], "secret": self._secret}

    def take_offer(self, offer: Mapping[str, Any]) -> None:
        """Learn where the hub is; a later offer replaces this one."""
        self._secret = str(offer["secret"])
        self._addresses = [(str(host), int(offer["port"])) for host in offer["hosts"]]
        self._retry_at = 0.0

    def connect(self, now: float) -> None:
        """Connect to the hub at one of its addresses, now and then."""
        if self.connections or now < self._retry_at:
            return
        self._retry_at = now + _RETRY_S
        for _ in range(len(self._addresses)):
            address = self._addresses.pop(0)
            self._addresses.append(address)  # another one first, if this one is no hub
            with contextlib.suppress(OSError):
                self._add(socket.create_connection(address, timeout=1.0))
                return

    # --- what arrives

    def select(self, timeout_s: float) -> list[Any]:
        """Wait for connections and messages. Return the sockets that have some."""
        return [key.fileobj for key, _ in self._selector.select(timeout_s)]

    def serve(self, ready: Iterable[Any]) -> None:
        """Take what has arrived, and send more of what the other relays had no room for."""
        for each in ready:
            if each is self._server:
                self._accept(self._server)
            elif each in self.connections:
                self.attempt(each, self._receive)
        for connection in list(self.connections):
            self.attempt(connection, Connection.flush)

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection = self._add(server.accept()[0])
            if sum(not each.trusted for each in self.connections) > _STRANGERS:
                self._drop(connection)
            else:
                self.attempt(connection, lambda to: to.send_json(type="challenge", nonce=to.nonce))

    def _receive(self, connection: Connection) -> None:
        for kind, content in connection.receive():
            message = json.loads(content) if kind == JSON else None
            if connection.trusted and kind == WRITES:
                self._on_changes(connection, content)
            elif not isinstance(message, dict):
                raise ValueError("it is no relay")
            elif connection.trusted:
                self._on_message(connection, message)
            else:
                self._get_acquainted(connection, message)

    def _get_acquainted(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answer a message of a relay that has not proven yet that it knows the job's secret."""
        host, nonce = os.uname().nodename, str(message.get("nonce"))
        if not self._is_hub and message.get("type") == "challenge":
            connection.send_json(
                type="hello",
                host=host,
                world_size=self._world_size,
                proof=proof(self._secret, nonce, "node"),
                nonce=connection.nonce,
            )
            return
        side = "node" if self._is_hub else "hub"
        is_known = is_proof(message.get("proof"), self._secret, connection.nonce, side)
        if not is_known or (self._is_hub and message.get("world_size") != self._world_size):
            raise ValueError("it is no relay of this job")
        if self._is_hub:
            answer = proof(self._secret, nonce, "hub")
            connection.send_json(type="welcome", host=host, proof=answer)
        connection.trusted = True
        connection.host = str(message.get("host", ""))[:100]
        self._on_joined(connection)

    # --- what is sent

    def each(self, do: Callable[[Connection], None], *, but: Connection | None = None) -> None:
        """Do something with the connection to each relay that has proven itself."""
        for connection in list(self.connections):
            if connection.trusted and connection is not but:
                self.attempt(connection, do)

    def send(self, **message: Any) -> None:
        """Send an object to all of these relays."""
        self.each(lambda to: to.send_json(**message))

    def beat(self, now: float) -> None:
        """Give a sign of life, and lose the relays that give none."""
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.send(type="beat")
        for connection in list(self.connections):
            silent = now - connection.heard
            if silent > (LOST_S if connection.trusted else _HANDSHAKE_S):
                self._lose(connection, f"nothing was heard of it for {silent:.0f} s")

    def attempt(self, connection: Connection, do: Callable[[Connection], None]) -> None:
        """Do something with a connection; if it fails, the node is lost."""
        try:
            do(connection)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._lose(connection, str(error) or type(error).__name__)

    # --- the end

    def close(self, *, failed: bool = False) -> None:
        """Leave the other relays."""
        for connection in self.connections:
            with contextlib.suppress(OSError, ValueError):
                if not failed:
                    connection.send_json(type="bye")
                connection.socket.settimeout(0.5)
                connection.flush()
            connection.close()
        if self._server is not None:
            self._server.close()
        self._selector.close()

    def _lose(self, connection: Connection, why: str) -> None:
        self._drop(connection)
        self._on_lost(connection, why)

    def _add(self, sock: socket.socket) -> Connection:
        connection = Connection(sock)
        self.connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        return connection

    def _drop(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()
