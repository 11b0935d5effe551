"""The relay of one node: copies of the other nodes' boards for its ranks, and refusals that all
nodes share.

The ranks of a node meet in shared memory and do not know of the network: the relay keeps a copy of
every other node's boards in their folder (``boards/mirror.py``), rings the bells of the ranks
there, and sends what its own ranks announce. The relay of rank 0's node is the hub: the other
relays connect to it, and it passes on the bytes that each of them sends. It also decides which
refusal of a collective was first, so that all ranks of all nodes raise the same text.

The messages between the hub and another relay::

    hub   challenge (nonce)
    node  hello (world size, proof that it knows the job's secret, nonce)
    hub   welcome (proof)
    both  board (rank), changes, publish (rank)    of each rank that runs there: its whole board
    both  changes                                  what its ranks announce: bytes of their boards
    node  draft (refusal)                          a rank there refuses a collective
    hub   refusal (refusal)                        it is the first of its collective: all post it
    hub   lost (ranks)                             of another node
    both  beat                                     every half second
    both  bye

A node that is not heard of for ``LOST_S`` is given up for good, with one line: its ranks are no
longer waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
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
from commlens.verification.relay.connection import WRITES, Connection, pack_writes, unpack_writes
from commlens.verification.relay.other_relays import OtherRelays

TICK_S: Final = 0.05
PATIENCE_S: Final = 10.0  # from the start, for nodes that do not join
LINGER_S: Final = 10.0  # of the hub, for nodes whose ranks run on
_WAITS_NS: Final = 150_000_000  # a rank that has waited for so long may be part of a cycle


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
        # refusals of ranks here that also concern other nodes, until the hub posts them
        self._drafts = RefusalLog(folder, refusal_log.DRAFTS)
        self._drafts_sent = 0
        self._bells = RemoteBells(self._log.map)
        self._lock = threading.RLock()
        self._feeds: dict[int, Feed] = {}  # by rank of this node
        self._mirrors: dict[int, Mirror] = {}  # by rank of another node
        self._ended: set[int] = set()  # of this node
        self.others = OtherRelays(
            world_size,
            is_hub=is_hub,
            on_joined=self._send_boards,
            on_message=self._take,
            on_changes=self._apply,
            on_lost=self._lose,
        )
        # key and number of the refusals that were posted on all nodes: the ranks that they concern
        self._posted: dict[tuple[int, int], list[int]] = {}
        # by rank that asks for the whereabouts of a rank here: its last question, once answered
        self._questions: dict[int, int] = {}
        self._own_start = job_dirs.start_ticks(os.getpid())
        self._began = self._ended_at = time.monotonic()
        self._closing = False

    def take_offers(self, rank: socket.socket) -> None:
        """Read lines from a rank, in a thread: each says where the hub is, the last of them
        counts.
        """

        def read() -> None:
            with contextlib.suppress(OSError, ValueError), rank:
                for line in rank.makefile("rb"):
                    offer = json.loads(line)
                    with self._lock:
                        self.others.take_offer(offer)

        threading.Thread(target=read, daemon=True).start()

    # --- the loop

    def run(self) -> None:
        """Relay until all ranks of this node have ended."""
        next_tick = 0.0
        while True:
            ready = self.others.select(max(0.0, next_tick - time.monotonic()))
            with self._lock:
                self.others.serve(ready)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_S
                    if self._tick():
                        return

    def close(self, *, failed: bool = False) -> None:
        """Leave the other relays and remove the copies."""
        with self._lock:
            self._closing = True
            self.others.close(failed=failed)
            for mirror in self._mirrors.values():
                mirror.remove()
            if failed:
                self._log.link = refusal_log.ALONE
            else:
                self._drafts.path.unlink(missing_ok=True)

    def _tick(self) -> bool:
        """Do the periodic work. Return whether the relay may end."""
        self._find_boards()
        now = time.monotonic()
        # A node that was lost is given up for good, and ranks that have ended need no other node.
        have_ended = bool(self._feeds) and len(self._ended) == len(self._feeds)
        if not self._mirrors and not have_ended:
            self.others.connect(now)
        waits = any(feed.waited_ns > _WAITS_NS for feed in self._feeds.values())
        changes = [
            (rank, *write) for rank, feed in self._feeds.items() for write in feed.rest(waits=waits)
        ]
        self._send_changes(changes + list(self._ends()))
        self._send_drafts()
        self.others.beat(now)
        for connection in self.others.connections:
            for rank in connection.ranks:
                self._mirrors[rank].heard(connection.heard)
        is_left = any(
            rank not in self._ended and not feed.board.word(B.CLOSED)
            for rank, feed in self._feeds.items()
        )
        # If all have ended, the ranks that read the state of the link may be those of the job's
        # next start.
        if is_left:
            self._update_link(now)
        is_expected = not self._feeds and now - self._began < PATIENCE_S  # no rank has a board yet
        if is_left or is_expected:
            self._ended_at = now
        return self._may_end(now)

    def _may_end(self, now: float) -> bool:
        """Return whether all ranks of this node have ended and, at the hub, other nodes need it no
        longer.
        """
        is_needed = self._is_hub and any(
            connection.trusted and not connection.is_leaving
            for connection in self.others.connections
        )
        return now > self._ended_at + (LINGER_S if is_needed else 0.0)

    def _update_link(self, now: float) -> None:
        """Tell the ranks here whether all ranks of the job have joined, for which they wait."""
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
        """Find new boards of ranks on this node, and send them to the other nodes."""
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
            has_ended = job_dirs.process_has_ended(board.pid, board.start_ticks)
            if board.is_remote or not is_ours or has_ended:
                continue
            self._feeds[board.rank] = Feed(board, self._reaches_out)
            self.others.each(partial(self._send_board, board=board))
            threading.Thread(target=self._pump, args=(board.rank,), daemon=True).start()

    def _reaches_out(self, ranks: Any) -> bool:
        """Return whether a channel has ranks on other nodes; yes, if its ranks are unknown."""
        return not isinstance(ranks, list) or any(rank not in self._feeds for rank in ranks)

    def _pump(self, rank: int) -> None:
        """Send what ranks here announce whenever the bell of a rank rings, in a thread: sooner than
        the next tick.
        """
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
        """Yield the changes of boards whose processes have ended since the last time: a killed
        process cannot write that itself.
        """
        for rank, feed in self._feeds.items():
            if rank not in self._ended and job_dirs.process_has_ended(
                feed.board.pid, feed.board.start_ticks
            ):
                self._ended.add(rank)
                yield rank, B.ENDED, (1).to_bytes(8, "little")

    # --- the other relays

    def _lose(self, connection: Connection, why: str) -> None:
        """Give up a node, or on a node without rank 0 all other nodes."""
        self._lose_ranks(connection.ranks, f"{connection.host or 'other nodes'} ({why})")
        if self._is_hub and connection.ranks:
            self.others.send(type="lost", ranks=sorted(connection.ranks))

    def _lose_ranks(self, ranks: Iterable[int], where: str) -> None:
        lost = [rank for rank in ranks if self._lose_rank(rank)]
        if lost and self._feeds.keys() - self._ended:
            self.say(
                f"strict verification has lost {ranks_phrase(lost)} on {where}: from now on, their"
                " collectives are not compared with those of this node"
            )

    def _lose_rank(self, rank: int) -> bool:
        """Mark the copy of a rank's board as lost. Return whether the rank was still running."""
        mirror = self._mirrors.get(rank)
        if mirror is None or mirror.is_lost or mirror.word(B.CLOSED) or mirror.word(B.ENDED):
            return False
        mirror.lose()
        self._bells.ring(rank)
        return True

    def _send_boards(self, connection: Connection) -> None:
        """Send the boards that a relay needs which has just joined."""
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
        whole = Feed(board, lambda _: True)  # as if each channel had ranks on other nodes
        connection.send(
            WRITES,
            pack_writes((board.rank, *write) for write in [*whole.news(), *whole.rest(waits=True)]),
        )
        connection.send_json(type="publish", rank=board.rank)

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
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
            self._lose_ranks(map(int, message["ranks"]), "another node")
        elif what == "bye":
            connection.is_leaving = True

    def _publish(self, connection: Connection, rank: int) -> None:
        """Let the ranks here see the copy of a board, which is now whole; as the hub send it on."""
        mirror = self._mirrors[rank]
        if rank not in connection.ranks or mirror.is_published:
            raise ValueError(f"it has no rank {rank}")
        mirror.publish()
        self._bells.add(rank)
        self._log.count_board()
        if self._is_hub:
            board = PeerBoard(mirror.path)
            self.others.each(partial(self._send_board, board=board), but=connection)

    def _apply(self, connection: Connection, content: bytes) -> None:
        """Write changes of another node's boards into the copies, wake the ranks that wait for
        them, and as the hub pass them on: those of whole boards, else the others have no copy.
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
        if self._is_hub and all(self._mirrors[rank].is_published for rank in ranks):
            self.others.each(lambda to: to.send(WRITES, content), but=connection)
        self._answer_questions(questions)

    def _send_changes(self, changes: list[tuple[int, int, bytes]]) -> None:
        if changes:
            content = pack_writes(changes)
            self.others.each(lambda to: to.send(WRITES, content))

    # --- refusals

    def _send_drafts(self) -> None:
        while self._drafts_sent < self._drafts.count():
            refusal = self._drafts.read(self._drafts_sent)
            self._drafts_sent += 1
            if self._is_hub:
                self._post(refusal)
            else:
                self.others.send(type="draft", refusal=refusal)

    def _post(self, refusal: dict[str, Any]) -> None:
        """As the hub, post a refusal on all nodes, if it is the first of its collective.

        Drop it if, when its rank wrote it, a refusal that concerns that rank was on its way there:
        that one is raised first, and this one may be its consequence.
        """
        identity = (int(refusal["key"]), int(refusal["number"]))
        unseen = list(self._posted.values())[int(refusal.get("seen", 0)) :]
        if identity in self._posted or any(refusal.get("by") in ranks for ranks in unseen):
            return
        self._posted[identity] = list(refusal.get("ranks", ()))
        self.others.send(type="refusal", refusal=refusal)
        self._post_here(refusal)

    def _post_here(self, refusal: dict[str, Any]) -> None:
        self._log.post_shared(int(refusal["key"]), int(refusal["number"]), refusal)
        self._bells.wake(rank for rank in refusal.get("ranks", ()) if rank in self._feeds)

    # --- whereabouts of ranks

    def _answer_questions(self, questions: Iterable[tuple[int, int]]) -> None:
        """Send all nodes where ranks here are, if ranks of other nodes ask for it: a rank that is
        waited for too long is described in the refusal (asleep, in which line, ...).

        Args:
            questions: the rank that asks, and its question: a counter, and in the lower 32 bits the
                rank that it asks about, plus 1. 0: none.
        """
        for asker, question in questions:
            about = (question & 0xFFFFFFFF) - 1
            is_new = question and self._questions.get(asker) != question
            if is_new and about in self._feeds and asker not in self._feeds:
                self._questions[asker] = question
                board = self._feeds[about].board
                from commlens.verification.whereabouts import whereabouts

                told = whereabouts(self._folder, {about: board.pid}, watch=False)[about]
                text = told.encode()[: B.ANSWER_MAX]
                self._send_changes(
                    [(about, B.ANSWER_AT, B.ANSWER.pack(question, len(text)) + text)]
                )
