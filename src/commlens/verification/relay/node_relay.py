"""The relay of one node: copies of the other nodes' boards for its ranks, and refusals that all
nodes share.

The ranks of a node meet in shared memory and do not know of the network: the relay keeps a copy of
every other node's boards in their folder (``boards/mirror.py``), rings the bells of the ranks
there, and sends what its own ranks announce. The relay of rank 0's node is the hub: the other
relays connect to it, and it passes on the bytes that each of them sends. It also decides which
refusal of a collective was first, so that all ranks of all nodes raise the same text.

A node that is not heard of for ``LOST_S`` is given up for good, with one line: its ranks are no
longer waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards import refusal_log
from commlens.boards.board import PeerBoard
from commlens.boards.mirror import Feed, Mirror
from commlens.boards.refusal_log import RefusalLog
from commlens.boards.wakeup import RemoteBells
from commlens.text import ranks_phrase
from commlens.verification.relay.connection import (
    WRITES,
    Connection,
    is_proof,
    pack_writes,
    proof,
    unpack_writes,
)

TICK_S: Final = 0.05
BEAT_S: Final = 0.5
LOST_S: Final = 5.0
PATIENCE_S: Final = 10.0  # from the start, for nodes that do not join
LINGER_S: Final = 10.0  # of the hub, for nodes whose ranks run on
_RETRY_S: Final = 0.3
_WAITS_NS: Final = 150_000_000  # a rank that has waited for so long may be part of a cycle
_HANDSHAKE_S: Final = 5.0
_STRANGERS: Final = 256  # connections that have not proven themselves


class Relay:
    """The relay of one node.

    Args:
        folder: the job's folder of black boxes.
        world_size: number of ranks of the job.
        is_hub: rank 0 is on this node.
    """

    def __init__(self, folder: Path, world_size: int, *, is_hub: bool) -> None:
        self._folder = folder
        self._world_size = world_size
        self._is_hub = is_hub
        self._log = RefusalLog(folder)
        self._drafts = RefusalLog(folder, refusal_log.DRAFTS)
        self._drafts_seen = 0
        self._bells = RemoteBells(self._log.map)
        self._lock = threading.RLock()
        self._feeds: dict[int, Feed] = {}  # by rank of this node
        self._mirrors: dict[int, Mirror] = {}  # by rank of another node
        self._ended: set[int] = set()
        self._connections: list[Connection] = []
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None
        self._secret = ""
        self._offers: list[tuple[str, int]] = []  # addresses of the hub, to be tried
        self._retry_at = 0.0
        # key and number of the refusals that were posted on all nodes
        self._posted: set[tuple[int, int]] = set()
        self._concerned: list[list[int]] = []  # the ranks of each of them
        self._questions: dict[int, int] = {}  # by rank: its last question
        self._own_start = job_dirs.start_ticks(os.getpid())
        self._began = self._ended_at = time.monotonic()
        self._beat_at = 0.0
        self._closing = False

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

    def take_offers(self, descriptor: int) -> None:
        """Read lines from a pipe, in a thread: each says where the hub is, the last of them
        counts.
        """

        def read() -> None:
            with contextlib.suppress(OSError, ValueError), os.fdopen(descriptor, "rb") as pipe:
                for line in pipe:
                    offer = json.loads(line)
                    with self._lock:
                        self._secret = str(offer["secret"])
                        self._offers = [(str(host), int(offer["port"])) for host in offer["hosts"]]
                        self._retry_at = 0.0

        threading.Thread(target=read, daemon=True).start()

    # --- the loop

    def run(self) -> None:
        """Relay until all ranks of this node have ended."""
        next_tick = 0.0
        while True:
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                with self._lock:
                    if key.fileobj is self._server:
                        self._accept()
                    elif isinstance(key.fileobj, Connection) and key.fileobj in self._connections:
                        connection = key.fileobj
                        self._attempt(connection, lambda of=connection: self._receive(of))
            with self._lock:
                for connection in [each for each in self._connections if each.has_backlog]:
                    self._attempt(connection, connection.flush)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                with self._lock:
                    if self._tick():
                        return

    def close(self, *, failed: bool = False) -> None:
        """Leave the other relays and remove the copies."""
        with self._lock:
            self._closing = True
            for connection in self._connections:
                with contextlib.suppress(OSError, ValueError):
                    if not failed:
                        connection.send_json(type="bye")
                    connection.socket.settimeout(0.5)
                    connection.flush()
                connection.close()
            if self._server is not None:
                self._server.close()
            self._selector.close()
            for mirror in self._mirrors.values():
                mirror.remove()
            if failed:
                self._log.link = refusal_log.ALONE
            else:
                self._drafts.path.unlink(missing_ok=True)

    def _tick(self) -> bool:
        """Do the periodic work. Return whether all ranks of this node have ended."""
        self._find_boards()
        now = time.monotonic()
        if not self._connections and self._offers and now >= self._retry_at and not self._is_over:
            self._retry_at = now + _RETRY_S
            self._connect()
        waits = any(feed.waited_ns > _WAITS_NS for feed in self._feeds.values())
        changes = [
            (rank, *write) for rank, feed in self._feeds.items() for write in feed.rest(waits=waits)
        ]
        self._send_changes(changes + list(self._ends()))
        self._send_drafts()
        self._beat(now)
        is_left = any(
            rank not in self._ended and not feed.board.word(B.CLOSED)
            for rank, feed in self._feeds.items()
        )
        # else the ranks that read the state of the link may be those of the next start of the job
        if is_left:
            self._update_link(now)
        if is_left or (not self._feeds and now - self._began < PATIENCE_S):
            self._ended_at = now
        return self._may_end(now)

    def _beat(self, now: float) -> None:
        """Give a sign of life, and lose the relays that give none."""
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._send_all(type="beat")
        for connection in list(self._connections):
            for rank in connection.ranks:
                self._mirrors[rank].heard(connection.heard)
            silent = now - connection.heard
            if silent > (LOST_S if connection.trusted else _HANDSHAKE_S):
                self._lose(connection, f"nothing was heard of it for {silent:.0f} s")

    def _may_end(self, now: float) -> bool:
        """Return whether all ranks of this node have ended and, at the hub, other nodes need it no
        longer.
        """
        busy = self._is_hub and any(
            connection.trusted and not connection.is_leaving for connection in self._connections
        )
        return now > self._ended_at + (LINGER_S if busy else 0.0)

    @property
    def _is_over(self) -> bool:
        return bool(self._mirrors) or (bool(self._feeds) and len(self._ended) == len(self._feeds))

    def _update_link(self, now: float) -> None:
        known = self._feeds.keys() | {
            rank for rank, mirror in self._mirrors.items() if mirror.is_published
        }
        if self._log.link == refusal_log.LINKED:
            return
        if len(known) >= self._world_size:
            self._log.link = refusal_log.LINKED
        elif self._log.link == refusal_log.CONNECTING and now - self._began > PATIENCE_S:
            self._log.link = refusal_log.ALONE
            missing = [rank for rank in range(self._world_size) if rank not in known]
            if missing and self._feeds.keys() - self._ended:
                self.say(
                    f"{ranks_phrase(missing)} did not join strict verification within"
                    f" {PATIENCE_S:.0f} s (commlens is not switched on there, or the node is not"
                    " reachable): their collectives are not compared with those of this node"
                )

    def say(self, text: str) -> None:
        """Print a line where the ranks print."""
        with contextlib.suppress(OSError, ValueError):
            print(f"commlens: {text}", file=sys.stderr, flush=True)

    # --- the ranks of this node

    def _find_boards(self) -> None:
        if len(self._feeds) + len(self._mirrors) >= self._world_size:
            return
        for path in self._folder.glob(f"rank*{B.SUFFIX}"):
            name = path.name.removeprefix("rank").split(".")[0]
            if not name.isdecimal() or int(name) in self._feeds or int(name) in self._mirrors:
                continue
            try:
                board = PeerBoard(path)
            except (OSError, ValueError):
                continue
            # A rank starts the relay, so a process that is younger belongs to a later start of the
            # job.
            is_ours = board.rank == int(name) and board.start_ticks <= self._own_start
            if (
                board.is_remote
                or not is_ours
                or job_dirs.process_has_ended(board.pid, board.start_ticks)
            ):
                continue
            self._feeds[board.rank] = Feed(board, self._reaches_out)
            for connection in self._connections:
                if connection.trusted:
                    self._attempt(
                        connection, lambda to=connection, of=board: self._send_board(to, of)
                    )
            threading.Thread(target=self._pump, args=(board.rank,), daemon=True).start()

    def _reaches_out(self, ranks: Any) -> bool:
        return not isinstance(ranks, list) or any(rank not in self._feeds for rank in ranks)

    def _pump(self, rank: int) -> None:
        """Send what ranks here announce when a bell of one rings for another node."""
        heard = -1
        while not self._closing:
            now_heard = self._bells.heard(rank)
            if now_heard != heard:
                heard = now_heard
                with self._lock:
                    self._send_changes(
                        [
                            (each, *write)
                            for each, feed in self._feeds.items()
                            for write in feed.news()
                        ]
                    )
                    self._send_drafts()
            self._bells.sleep(rank, heard, 1_000_000_000)

    def _ends(self) -> Iterator[tuple[int, int, bytes]]:
        for rank, feed in self._feeds.items():
            if rank not in self._ended and job_dirs.process_has_ended(
                feed.board.pid, feed.board.start_ticks
            ):
                self._ended.add(rank)
                yield rank, B.ENDED, (1).to_bytes(8, "little")

    # --- the other relays

    def _accept(self) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):
            connection = self._add(self._server.accept()[0])
            if sum(not each.trusted for each in self._connections) > _STRANGERS:
                self._drop(connection)
            else:
                self._attempt(
                    connection,
                    lambda: connection.send_json(type="challenge", nonce=connection.nonce),
                )

    def _connect(self) -> None:
        for _ in range(len(self._offers)):
            address = self._offers.pop(0)
            self._offers.append(address)  # another one first, if this one turns out to be no hub
            with contextlib.suppress(OSError):
                self._add(socket.create_connection(address, timeout=1.0))
                return

    def _add(self, sock: socket.socket) -> Connection:
        connection = Connection(sock)
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        return connection

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()

    def _attempt(self, connection: Connection, do: Any) -> None:
        """Do something with a connection; if it fails, the node is lost."""
        try:
            do()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._lose(connection, str(error) or type(error).__name__)

    def _lose(self, connection: Connection, why: str) -> None:
        """Give up a node, or on a node without rank 0 all other nodes."""
        self._drop(connection)
        lost = [rank for rank in connection.ranks if self._lose_rank(rank)]
        if lost and self._feeds.keys() - self._ended:
            self.say(
                f"strict verification has lost {ranks_phrase(lost)} on"
                f" {connection.host or 'other nodes'} ({why}): from now on, their collectives are"
                " not compared with those of this node"
            )
        if self._is_hub and connection.ranks:
            self._send_all(type="lost", ranks=sorted(connection.ranks))

    def _lose_rank(self, rank: int) -> bool:
        """Mark a copy as lost. Returns whether the rank was still running."""
        mirror = self._mirrors.get(rank)
        if mirror is None or mirror.is_lost:
            return False
        if mirror.word(B.CLOSED) or mirror.word(B.ENDED):
            return False
        mirror.lose()
        self._bells.ring(rank)
        return True

    def _receive(self, connection: Connection) -> None:
        for kind, content in connection.receive():
            if kind == WRITES:
                if not connection.trusted:
                    raise ValueError("it is no relay")
                self._apply(connection, content)
                continue
            message = json.loads(content)
            if not isinstance(message, dict):
                raise ValueError("it is no relay")
            if connection.trusted:
                self._handle(connection, message)
            else:
                self._get_acquainted(connection, message)

    def _get_acquainted(self, connection: Connection, message: dict[str, Any]) -> None:
        host = os.uname().nodename
        if self._is_hub:
            if message.get("world_size") != self._world_size or not is_proof(
                message.get("proof"), self._secret, connection.nonce, "node"
            ):
                raise ValueError("it is no relay of this job")
            connection.send_json(
                type="welcome",
                host=host,
                proof=proof(self._secret, str(message.get("nonce")), "hub"),
            )
        elif message.get("type") == "challenge":
            mine = proof(self._secret, str(message.get("nonce")), "node")
            connection.send_json(
                type="hello",
                host=host,
                world_size=self._world_size,
                proof=mine,
                nonce=connection.nonce,
            )
            return
        elif not is_proof(message.get("proof"), self._secret, connection.nonce, "hub"):
            raise ValueError("it is not the hub of this job")
        connection.trusted = True
        connection.host = str(message.get("host", ""))[:100]
        for rank, feed in self._feeds.items():
            if rank not in self._ended:
                self._send_board(connection, feed.board)
        if self._is_hub:
            for mirror in self._mirrors.values():
                if mirror.is_published and not mirror.is_lost:
                    self._send_board(connection, PeerBoard(mirror.path))

    def _send_board(self, connection: Connection, board: PeerBoard) -> None:
        """Send a whole board. Its changes follow."""
        connection.send_json(type="board", rank=board.rank)
        whole = Feed(board, lambda _: True)
        connection.send(
            WRITES,
            pack_writes((board.rank, *write) for write in [*whole.news(), *whole.rest(waits=True)]),
        )
        connection.send_json(type="publish", rank=board.rank)

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        what = message.get("type")
        if what == "board":
            rank = int(message["rank"])
            if rank in self._feeds or rank in self._mirrors or not 0 <= rank < self._world_size:
                raise ValueError(f"it has rank {rank}, too")
            self._mirrors[rank] = Mirror(self._folder, rank)
            connection.ranks.add(rank)
        elif what == "publish":
            self._publish(connection, int(message["rank"]))
        elif what == "draft" and self._is_hub:
            self._post(message["refusal"])
        elif what == "refusal":
            self._post_here(message["refusal"])
        elif what == "lost":
            lost = [rank for rank in message["ranks"] if self._lose_rank(int(rank))]
            if lost and self._feeds.keys() - self._ended:
                self.say(
                    f"strict verification has lost {ranks_phrase(lost)} on another node: they are"
                    " no longer compared with"
                )
        elif what == "bye":
            connection.is_leaving = True

    def _publish(self, connection: Connection, rank: int) -> None:
        mirror = self._mirrors[rank]
        if rank not in connection.ranks or mirror.is_published:
            raise ValueError(f"it has no rank {rank}")
        mirror.publish()
        self._bells.add(rank)
        self._log.count_board()
        if self._is_hub:
            for other in self._connections:
                if other is not connection and other.trusted:
                    self._attempt(
                        other, lambda to=other: self._send_board(to, PeerBoard(mirror.path))
                    )

    def _apply(self, connection: Connection, content: bytes) -> None:
        """Write changes of another node's boards into the copies, wake the ranks that wait for
        them, and as the hub pass them on.
        """
        questions: list[tuple[int, int]] = []
        ranks: dict[int, None] = {}
        for rank, offset, data in unpack_writes(content):
            if rank not in connection.ranks:
                raise ValueError(f"it has no rank {rank}")
            self._mirrors[rank].apply(offset, data)
            ranks[rank] = None
            if offset == B.ASKS:
                questions.append((rank, int.from_bytes(data, "little")))
        for rank in ranks:
            self._bells.ring(rank)
        if self._is_hub:
            for other in list(self._connections):
                if (
                    other is not connection
                    and other.trusted
                    and all(self._mirrors[rank].is_published for rank in ranks)
                ):
                    self._attempt(other, lambda to=other: to.send(WRITES, content))
        self._answer_questions(self._feeds, questions)

    def _send_changes(self, changes: list[tuple[int, int, bytes]]) -> None:
        if changes:
            content = pack_writes(changes)
            for connection in list(self._connections):
                if connection.trusted:
                    self._attempt(connection, lambda to=connection: to.send(WRITES, content))

    def _send_all(self, **message: Any) -> None:
        for connection in list(self._connections):
            if connection.trusted:
                self._attempt(connection, lambda to=connection: to.send_json(**message))

    # --- refusals

    def _send_drafts(self) -> None:
        while self._drafts_seen < self._drafts.count():
            refusal = self._drafts.read(self._drafts_seen)
            self._drafts_seen += 1
            if self._is_hub:
                self._post(refusal)
            else:
                self._send_all(type="draft", refusal=refusal)

    def _post(self, refusal: dict[str, Any]) -> None:
        """As the hub, post a refusal on all nodes, if it is the first of its collective and its
        rank knew all that concern the rank.
        """
        identity = (int(refusal["key"]), int(refusal["number"]))
        newer = self._concerned[int(refusal.get("seen", 0)) :]
        if identity in self._posted or any(refusal.get("by") in ranks for ranks in newer):
            return
        self._posted.add(identity)
        self._concerned.append(list(refusal.get("ranks", ())))
        self._send_all(type="refusal", refusal=refusal)
        self._post_here(refusal)

    def _post_here(self, refusal: dict[str, Any]) -> None:
        self._log.post_shared(int(refusal["key"]), int(refusal["number"]), refusal)
        self._bells.wake(rank for rank in refusal.get("ranks", ()) if rank in self._feeds)

    # --- whereabouts of ranks

    def _answer_questions(self, here: Iterable[int], questions: Iterable[tuple[int, int]]) -> None:
        """Send all nodes the whereabouts of ranks here that others ask for."""
        for asker, question in questions:
            about = (question & 0xFFFFFFFF) - 1
            if (
                question
                and self._questions.get(asker) != question
                and about in here
                and asker not in here
            ):
                self._questions[asker] = question
                board = self._feeds[about].board
                from commlens.verification.whereabouts import whereabouts

                told = whereabouts(self._folder, {about: board.pid}, watch=False)[about]
                text = told.encode()[: B.ANSWER_MAX]
                self._send_changes(
                    [(about, B.ANSWER_AT, B.ANSWER.pack(question, len(text)) + text)]
                )
