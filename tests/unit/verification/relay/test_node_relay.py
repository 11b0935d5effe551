"""Relays of several nodes, as threads of this process: they meet only with the secret, and lose
each other without harm.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards import refusal_log
from commlens.boards.board import Board, PeerBoard
from commlens.boards.refusal_log import RefusalLog
from commlens.boards.wakeup import Bells
from commlens.verification.relay import node_relay, other_relays
from commlens.verification.relay.node_relay import Relay

KEY = 77


class Node:
    """A node with one rank and a relay."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank = folder, rank
        folder.mkdir()
        self.log = RefusalLog(folder)
        self.board = Board(folder / f"rank{rank}.1.board", rank, job_dirs.start_ticks(os.getpid()))
        self.board.set_word(B.ACTIVE, 1)
        self.bells = Bells(self.log.map, rank)
        self.relay = Relay(folder, world_size, is_hub=rank == 0)
        self.said: list[str] = []
        self.relay.say = self.said.append  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.relay.run()
        self.relay.close()

    def offer(self, offer: dict[str, object], **changed: object) -> None:
        made = {"hosts": ["127.0.0.1"], **offer, **changed}
        with self.relay._lock:
            self.relay.others.take_offer(made)

    def copy(self, rank: int) -> PeerBoard:
        return PeerBoard(self.folder / f"rank{rank}.{os.getpid()}.board")


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], tuple[list[Node], dict[str, object]]]]:
    monkeypatch.setattr(other_relays, "LOST_S", 0.4)
    monkeypatch.setattr(other_relays, "BEAT_S", 0.1)
    monkeypatch.setattr(node_relay, "PATIENCE_S", 1.0)
    monkeypatch.setattr(node_relay, "LINGER_S", 0.5)
    made: list[Node] = []

    def nodes(count: int) -> tuple[list[Node], dict[str, object]]:
        made.extend(Node(tmp_path / str(rank), rank, count) for rank in range(count))
        offer = made[0].relay.others.listen("127.0.0.1")
        for node in made:
            node.thread.start()
        return made, offer

    yield nodes
    for node in made:
        with contextlib.suppress(OSError):
            node.board.close()
    for node in made:
        node.thread.join(5)
        assert not node.thread.is_alive()
        assert not list(node.folder.glob(f"*.{os.getpid()}.board")), "a copy was left behind"


def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def linked(node: Node) -> bool:
    return node.log.link == refusal_log.LINKED


def test_three_nodes_share_announcements_and_refusals(
    make: Callable[[int], tuple[list[Node], dict[str, object]]],
) -> None:
    nodes, offer = make(3)
    for node in nodes[1:]:
        node.offer(offer)
    until(lambda: all(map(linked, nodes)))
    slots = [node.board.add_channel(KEY, {"ranks": [0, 1, 2]}) for node in nodes]
    for node, slot in zip(nodes, slots, strict=True):
        node.board.announce(slot, 1, 100 + node.rank, 0, 0)
        node.bells.ring([rank for rank in range(3) if rank != node.rank])
    for node in nodes:
        for other in nodes:
            if other is not node:
                board = node.copy(other.rank)
                wanted = (100 + other.rank, 0, 0)
                until(
                    lambda board=board, wanted=wanted: (
                        (slot := board.slot(KEY)) and board.announced(slot, 1) == wanted
                    )
                )
    # Two nodes refuse the same collective: all nodes take the same one.
    for node in nodes[1:]:
        drafts = RefusalLog(node.folder, refusal_log.DRAFTS)
        drafts.post(KEY, 1, {"text": f"by {node.rank}", "kind": "mismatch/op", "ranks": [0, 1, 2]})
        node.bells.ring([0])
    until(lambda: all(node.log.count() for node in nodes))
    time.sleep(0.2)
    assert {node.log.count() for node in nodes} == {1}
    assert len({node.log.read(0)["text"] for node in nodes}) == 1
    # Two ranks refuse different collectives without knowing of each other: all ranks raise the
    # first.
    for node in nodes[1:]:
        content = {
            "text": f"by {node.rank}",
            "kind": "missing",
            "ranks": [0, 1, 2],
            "by": node.rank,
            "seen": 1,
        }
        RefusalLog(node.folder, refusal_log.DRAFTS).post(KEY + node.rank, 2, content)
        node.bells.ring([0])
    until(lambda: all(node.log.count() == 2 for node in nodes))
    time.sleep(0.2)
    assert {node.log.count() for node in nodes} == {2}
    assert [node.said for node in nodes] == [[], [], []]


def test_a_node_that_closed_in_order_is_not_lost(
    make: Callable[[int], tuple[list[Node], dict[str, object]]],
) -> None:
    nodes, offer = make(2)
    nodes[1].offer(offer)
    until(lambda: all(map(linked, nodes)))
    board = nodes[0].copy(1)
    nodes[1].board.close()
    nodes[1].thread.join(5)
    until(lambda: board.word(B.CLOSED))
    assert board.word(B.REMOTE) == B.LINKED
    assert nodes[0].said == []


def test_a_silent_node_is_lost_with_one_line_and_not_waited_for(
    make: Callable[[int], tuple[list[Node], dict[str, object]]],
) -> None:
    nodes, offer = make(3)
    for node in nodes[1:]:
        node.offer(offer)
    until(lambda: all(map(linked, nodes)))
    # its relay does nothing any more, as if it were stopped or the network cut
    with nodes[2].relay._lock:
        until(lambda: nodes[0].copy(2).word(B.REMOTE) == B.LOST)
        until(lambda: nodes[1].copy(2).word(B.REMOTE) == B.LOST)
    assert nodes[0].copy(2).word(B.ACTIVE) == 0
    assert nodes[0].copy(1).word(B.REMOTE) == B.LINKED
    until(lambda: all("rank 2" in " ".join(node.said) for node in nodes[:2]))
    until(lambda: nodes[2].said)
    assert [len(node.said) for node in nodes] == [1, 1, 1]


@pytest.mark.parametrize("changed", [{"secret": "0" * 32}, {"port": 1}])
def test_without_the_secret_there_is_no_link(
    make: Callable[[int], tuple[list[Node], dict[str, object]]], changed: dict[str, object]
) -> None:
    nodes, offer = make(2)
    nodes[1].offer(offer, **changed)
    until(lambda: all(node.log.link == refusal_log.ALONE for node in nodes))
    assert not nodes[0].folder.joinpath(f"rank1.{os.getpid()}.board").exists()
    assert all(len(node.said) == 1 and "did not join" in node.said[0] for node in nodes)


def test_strangers_and_second_copies_of_a_rank_are_refused(
    make: Callable[[int], tuple[list[Node], dict[str, object]]],
) -> None:
    nodes, offer = make(2)
    nodes[1].offer(offer)
    until(lambda: all(map(linked, nodes)))
    with socket.create_connection(("127.0.0.1", int(str(offer["port"])))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(3)
        until(lambda: not stranger.recv(4096))
    with socket.create_connection(("127.0.0.1", int(str(offer["port"])))) as stranger:
        stranger.sendall(b"\xff\xff\xff\x7fW")  # 2 GB
        stranger.settimeout(3)
        with contextlib.suppress(ConnectionError):
            until(lambda: not stranger.recv(4096))
    # an earlier start of the job, or a copy of the node
    again = Relay(nodes[1].folder, 2, is_hub=False)
    others = again.others
    others.take_offer({"hosts": ["127.0.0.1"], **offer})
    try:
        with again._lock:
            again._find_boards()
            others.connect(0.0)
        (connection,) = others.connections
        until(lambda: not others.connections or others.attempt(connection, others._receive))
    finally:
        again.close(failed=True)
    assert linked(nodes[0])
    assert nodes[0].copy(1).word(B.REMOTE) == B.LINKED
    assert nodes[0].said == nodes[1].said == []
