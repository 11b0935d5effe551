"""Nodes that meet in a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from commlens.watch import nodes, other_nodes
from commlens.watch.nodes import Nodes

dist = pytest.importorskip("torch.distributed")


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Nodes]]:
    """Returns a function that lets a node with one rank meet the others."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(nodes, "store_address", lambda _: nodes.Address("127.0.0.1", store.port))
    monkeypatch.setattr(nodes, "waits", lambda _: [])
    members: list[Nodes] = []

    def start(rank: int) -> Nodes:
        members.append(Nodes(f"host{rank}", lambda: None))
        members[-1].meet([SimpleNamespace(rank=rank)], 0, dict)  # type: ignore[list-item]
        return members[-1]

    yield start
    for node in members:
        node.leave()


def eventually(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return result


def test_words_of_replaced_workers_are_not_heard(meet: Callable[[int], Nodes]) -> None:
    """torchelastic does not count a restart on a node whose own workers did not fail."""
    left, killed = meet(0), meet(1)
    assert eventually(lambda: left.others and killed.others)
    for node in (left, killed):
        node.update(dead=[node._mine.ranks[0]])
        node.announce("ending the job", abort=True)
    assert eventually(lambda: left.take_news() and killed.take_news()), "they hear each other"
    left.leave(lambda: b"evidence")
    thread, killed._thread = killed._thread, None  # as if its process was killed
    assert thread is not None
    thread.join(20)
    late = meet(2)
    assert eventually(lambda: late.others), "the one that was killed may still live"
    time.sleep(2 * nodes.PERIOD_S)
    assert late.take_news() == []
    assert late.dead_elsewhere == []
    assert late.gather(timeout_s=0.1)[0] == {}
    other = meet(3)
    other.announce("a stall")
    assert eventually(late.take_news)


def test_with_many_nodes_all_find_the_reporter_and_read_little(meet: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "READ_ALL_NODES", 3)
    members = [meet(rank) for rank in (7, 3, 9, 5, 0, 8, 6, 2)]
    first = members[4]
    assert eventually(
        lambda: len(first.others) == 7 and all(node.reporter and node.reporter.ranks == [0] for node in members if node is not first)
    )
    assert first.reporter is None
    evidence = {node._mine.slot: str(node._mine.ranks).encode() for node in members if node is not first}

    def answer() -> None:
        for node in members:
            if (request := node.take_request()) is not None:
                node.answer(request, evidence[node._mine.slot])

    ask = threading.Thread(target=lambda: found.append(first.gather(timeout_s=15)))
    found: list[Any] = []
    ask.start()
    assert eventually(lambda: answer() or found)
    assert found == [(evidence, [])]


def test_status_reads_the_other_nodes_without_taking_part(meet: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = meet(0), meet(1)
    assert eventually(lambda: here.others and there.others)
    there.update(dead=[1])
    monkeypatch.setattr(other_nodes, "store_address", nodes.store_address)
    members: Any = [SimpleNamespace(rank=0, restart=0)]
    lines = eventually(lambda: [line for line in other_nodes.other_node_lines(other_nodes.read_beats(members), [0]) if "died" in line])
    assert lines == ["rank 1 on host1: rank 1 has died."]
    assert [beat.slot for beat in other_nodes.read_beats(members)] == [0, 1], "no slot was drawn"
