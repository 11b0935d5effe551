"""Nodes that meet in a real store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from watch_ranks import member

from commlens.blackbox import layout
from commlens.watch import other_nodes
from commlens.watch.nodes import (
    bundles,
    gathering,
    known_nodes,
    lost,
    meeting_places,
    nodes_in_sight,
    periods,
    states_tree,
)
from commlens.watch.nodes import exchange as nodes
from commlens.watch.nodes.beat import key
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.lost import LostStoreReport
from commlens.watch.nodes.meeting_places import Folder, Place, Store
from commlens.watch.nodes.states import States
from commlens.watch.nodes.store_client import StoreClient
from commlens.watch.other_nodes import AskedNodes

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.launches


Meet = Callable[..., Nodes]
_SERVE = """
import sys, torch
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def serve_store() -> subprocess.Popen[bytes]:
    """Start a process that serves a store, and prints its port."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )


_MODULES = (
    bundles,
    gathering,
    known_nodes,
    lost,
    meeting_places,
    nodes,
    nodes_in_sight,
    periods,
    states_tree,
)
_QUICKER = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all times of an exchange shorter, so that their proportions stay."""
    for module in _MODULES:
        for name, seconds in vars(module).items():
            if name.endswith("_S") and isinstance(seconds, float):
                monkeypatch.setattr(module, name, seconds / _QUICKER)


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Meet]:
    """Returns a function that lets a node with one rank meet the others, in a store or in a folder."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(nodes, "waits", lambda _: [])
    members: list[Nodes] = []

    def start(rank: int, places: Sequence[Place] = ()) -> Nodes:
        monkeypatch.setattr(
            nodes, "places", lambda *_: list(places) or [Store("127.0.0.1", store.port)]
        )
        members.append(Nodes(f"host{rank}", lambda: None))
        tell(members[-1], rank)
        return members[-1]

    yield start
    for node in members:
        node.leave()


def tell(node: Nodes, rank: int, *, alive: bool = True) -> None:
    node.meet(
        [
            SimpleNamespace(
                rank=rank, world_size=4, alive=alive, status=SimpleNamespace(initialised=True)
            )
        ],
        dict,
    )  # type: ignore[list-item]


def kill(node: Nodes) -> None:
    """End a node's thread without a word."""
    thread, node._thread = node._thread, None
    assert thread is not None
    thread.join(20)


def as_it_is(slot: int, content: bytes) -> bytes:
    return content


def eventually(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return result


def test_words_of_replaced_workers_are_not_heard(meet: Meet) -> None:
    left, killed = meet(0), meet(1)
    assert eventually(lambda: left.others and killed.others)
    for node in (left, killed):
        node.update(dead=[node._mine.ranks[0]])
        node.announce("ending the job", abort=True)
    assert eventually(left.take_news) and eventually(killed.take_news), "they hear each other"
    left.leave(lambda: b"evidence")
    kill(killed)
    late = meet(2)
    assert eventually(lambda: late.others), "the one that was killed may still live"
    time.sleep(2 * periods.PERIOD_S)
    assert late.take_news() == []
    assert late.dead_elsewhere == []
    assert late.gather(as_it_is, timeout_s=0.1)[0] == {}
    other = meet(3)
    other.announce("a stall")
    assert eventually(late.take_news)


def test_with_many_nodes_all_find_the_reporter_and_read_little(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_nodes, "READ_ALL_NODES", 3)
    members = [meet(rank) for rank in (7, 3, 9, 5, 0, 8, 6, 2)]
    first = members[4]
    assert eventually(
        lambda: (
            len(first.others) == 7
            and all(
                node.reporter and node.reporter.ranks == [0]
                for node in members
                if node is not first
            )
        )
    )
    assert first.reporter is None
    evidence = {
        node._mine.slot: str(node._mine.ranks).encode() for node in members if node is not first
    }

    def answer() -> None:
        for node in members:
            if (request := node.take_request()) is not None:
                node.answer(request, evidence[node._mine.slot])

    asking = threading.Thread(target=lambda: found.append(first.gather(as_it_is, timeout_s=15)))
    found: list[Any] = []
    asking.start()
    assert eventually(lambda: answer() or found)
    assert found == [(evidence, [])]


def test_the_reporter_reads_bundles_and_what_a_lost_node_would_have_bundled(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_nodes, "READ_ALL_NODES", 3)
    monkeypatch.setattr(bundles, "GROUP", 3)
    for module in (bundles, nodes):
        monkeypatch.setattr(module, "BUNDLES_ABOVE", 3)
    monkeypatch.setattr(bundles, "_FEW", 2)
    read: list[str] = []
    get = StoreClient.get

    def note(client: StoreClient, keys: Sequence[str]) -> list[bytes]:
        if threading.current_thread() is first._thread:
            read.extend(keys)
        return get(client, keys)

    first, *others = [meet(rank) for rank in range(8)]
    monkeypatch.setattr(StoreClient, "get", note)
    assert eventually(lambda: len(first.others) == 7)
    time.sleep(3 * periods.PERIOD_S)
    neighbour = key("node", 5 if first._mine.slot == 4 else 4)

    def reads_bundles_alone() -> bool:
        read.clear()
        time.sleep(3 * periods.PERIOD_S)
        return bool(read) and neighbour not in read

    assert eventually(reads_bundles_alone), (
        "a bundle that is late on a busy machine is not waited for"
    )
    bundler = next((node for node in others if node._mine.slot == 3), None)
    if bundler is None:
        pytest.skip("the node that reports drew the slot of the bundler")
    kill(bundler)
    time.sleep(periods.LOST_S + 2 * periods.PERIOD_S)
    assert len(first.others) == 6, "all but the one that was killed"
    assert neighbour in read


@pytest.mark.parametrize("killed", [None, "inner", "root"])
def test_the_states_of_all_ranks_come_up_the_tree(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, killed: str | None
) -> None:
    monkeypatch.setattr(states_tree, "ARITY", 2)
    monkeypatch.setattr(states_tree, "LEVEL_S", 0.6)
    members = [meet(rank) for rank in (7, 3, 9, 5, 0, 8, 6, 2)]
    first = members[4]
    assert eventually(lambda: len(first.others) == 7 and all(node.reporter for node in members[:4]))
    by_slot = {node._mine.slot: node for node in members}
    lost = by_slot[{"inner": 1, "root": 0}.get(killed or "", -1)] if killed else None
    if lost is first:
        pytest.skip("the node that asks drew the slot of the root")
    own = {id(node): States({b"same": 1 << node._mine.ranks[0]}) for node in members}
    asked = threading.Event()

    def answer() -> None:
        for node in members:
            if node is not lost and (request := node.take_request()) is not None:
                asked.set()
                assert request.tree is not None
                node.answer(request, own[id(node)])

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(first.gather_states(own[id(first)])))
    thread.start()
    if lost is not None:
        kill(lost)  # others take it for alive, and wait for it
        members.remove(lost)
    assert eventually(lambda: answer() or found)
    expected = {0, 2, 3, 5, 6, 7, 8, 9} - (set(lost._mine.ranks) if lost is not None else set())
    assert asked.is_set()
    assert found[0].ranks == expected
    read = first._known.beats
    assert all(beat.answered[1] for beat in read if beat.ranks[0] in expected)


def test_an_answer_is_read_while_others_are_on_their_way(meet: Meet) -> None:
    first, quick, slow = meet(0), meet(1), meet(2)
    assert eventually(lambda: len(first.others) == 2 and quick.others and slow.others)
    read: list[bytes] = []
    asking = threading.Thread(
        target=lambda: found.append(
            first.gather(lambda slot, content: read.append(content) or content.decode())
        )
    )
    found: list[Any] = []
    asking.start()
    quick.answer(eventually(quick.take_request), b"quick")
    assert eventually(lambda: read == [b"quick"]) and not found
    slow.answer(eventually(slow.take_request), b"slow")
    assert eventually(lambda: found) == [({quick._mine.slot: "quick", slow._mine.slot: "slow"}, [])]
    assert read == [b"quick", b"slow"], "each once"


@pytest.mark.parametrize("at", ["values", "evidence"])
def test_an_answer_to_an_earlier_request_is_none_to_the_next(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    first, other = meet(0), meet(1)
    assert eventually(lambda: first.others and other.reporter)
    found: list[dict[int, bytes]] = []

    def gather() -> threading.Thread:
        thread = threading.Thread(
            target=lambda: found.append(first.gather(as_it_is, timeout_s=20)[0])
        )
        thread.start()
        return thread

    threads = [gather()]
    request = eventually(other.take_request)
    get = StoreClient.get

    def ask_again_meanwhile(client: StoreClient, keys: Sequence[str]) -> list[bytes]:
        values = get(client, keys)
        answers = (
            any("evidence" in key for key in keys)
            if at == "evidence"
            else any(b"old" in value for value in get(client, own))
        )
        if threading.current_thread() is first._thread and answers and len(threads) == 1:
            threads.append(gather())
            assert eventually(lambda: first._mine.asked.number == 2)
        return values

    own = [key("node", other._mine.slot)]
    monkeypatch.setattr(StoreClient, "get", ask_again_meanwhile)
    if at == "values":
        other.update(dump="old")
    other.answer(request, b"old")
    again = eventually(lambda: (taken := other.take_request()) and taken.number == 2 and taken)
    time.sleep(2 * periods.BUSY_PERIOD_S)
    assert {other._mine.slot: b"old"} not in found[1:]
    other.answer(again, b"new")
    for thread in threads:
        thread.join(20)
    assert found[-1] == {other._mine.slot: b"new"}


def test_a_command_asks_the_other_nodes_without_taking_part(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = meet(0), meet(1)
    assert eventually(lambda: here.others and there.others)
    there.update(dead=[1])
    (place,) = nodes.places([], None)
    client = place.open(lambda _: False)
    asked = eventually(
        lambda: (found := AskedNodes(client, [0])) and found.others[0].dead and found
    )
    assert [beat.slot for beat in asked.beats] == [0, 1], "no slot was drawn"
    # Asked, it looks at its ranks; a node that is gone does not answer.
    there._status_answers._take = lambda records: f"{records} records".encode()
    here._status_answers._take = pytest.fail
    slot = there._mine.slot
    for _ in range(2):
        assert asked.gather(as_it_is, of=[slot], records=64) == ({slot: b"64 records"}, [])
    monkeypatch.setattr(other_nodes, "_ANSWERS_S", 0.5)
    kill(there)
    assert asked.gather(as_it_is, of=[slot], records=64) == ({}, asked.others)
    late = meet(2)
    assert eventually(lambda: late.others) and late._known.count == 3, "looks are not nodes"
    client.close()


@pytest.mark.parametrize("lost", [None, 1])
def test_a_command_reads_the_states_of_all_ranks_from_the_root_of_the_tree(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, lost: int | None
) -> None:
    monkeypatch.setattr(states_tree, "ARITY", 2)
    monkeypatch.setattr(states_tree, "FIRST_S", 1.0)
    monkeypatch.setattr(states_tree, "LEVEL_S", 0.6)
    members = [meet(rank) for rank in range(7)]
    by_slot = {
        node._mine.slot: node for node in members if eventually(lambda n=node: n._mine.slot >= 0)
    }
    assert eventually(lambda: all(len(node.others) == 6 for node in members))
    for node in members:
        own = States({b"same": 1 << node._mine.ranks[0]})
        node._status_answers._take_states = lambda own=own: own
    (place,) = nodes.places([], None)
    client = place.open(lambda _: False)
    asked = AskedNodes(client, [])
    read: list[str] = []
    get = StoreClient.get
    monkeypatch.setattr(client, "get", lambda keys: read.extend(keys) or get(client, keys))
    if lost is not None:
        kill(by_slot[lost])
    states = asked.gather_states(States({}))
    assert states is not None
    assert states.ranks == {
        rank for slot, node in by_slot.items() if slot != lost for rank in node._mine.ranks
    }
    if lost is None:
        assert read == [key("look-states", 0)], "not of each node"
    client.close()


def test_two_incarnations_do_not_meet(meet: Meet) -> None:
    """torchelastic counts a restart only on the node whose workers failed, so the count does not
    tell them apart.
    """
    first, second = meet(0), meet(1)
    assert eventually(lambda: first.others and second.others)
    for node, rank in ((first, 0), (second, 1)):
        tell(node, rank, alive=False)
    assert eventually(lambda: first._mine.ended_at and second._mine.ended_at)
    first.announce("of the former workers")
    restarted = meet(1)
    joined = meet(2)  # its rank is new
    assert eventually(lambda: restarted.others and joined.others)
    for node in (restarted, joined):
        assert [beat.host for beat in node.others] == [{restarted: "host2", joined: "host1"}[node]]
        assert node.take_news() == []
    assert eventually(second.take_news), "the former ones still hear each other"
    assert [beat.host for beat in first.others] == ["host1"]


def test_the_next_node_reports_if_the_first_falls_silent(meet: Meet) -> None:
    first, second = meet(0), meet(1)
    assert eventually(lambda: second.reporter is not None and second.lost(0)), (
        "it has been heard twice"
    )
    kill(first)
    silent_since = time.monotonic()
    assert eventually(lambda: second.reporter is None)
    assert time.monotonic() - silent_since < periods.LOST_S + periods.PERIOD_S
    assert second.sentences_on_lost() == ["Node host0 (rank 0) no longer answers."]
    assert [(each.beat.host, each.by_itself) for each in second.lost(periods.LOST_S)] == [
        ("host0", True)
    ]


def test_nodes_without_a_store_meet_in_a_shared_folder(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MOVE_ON_S", 0.5)
    folder = tmp_path / "dumps" / "nodes"
    first, second = (meet(rank, [Store("127.0.0.1", 1), Folder(folder)]) for rank in (0, 1))
    assert eventually(lambda: first.others and second.reporter is not None)
    second.answer(nodes.LAST, b"evidence")
    assert eventually(
        lambda: list(first.gather(as_it_is, timeout_s=0.1)[0].values()) == [b"evidence"]
    )
    first.announce("a stall")
    assert eventually(second.take_news)
    second.leave()
    assert eventually(lambda: not first.others)
    first.leave()
    assert not folder.exists(), "no file is left behind"


def connections(port: int) -> int:
    """Return how many connections to a port of this machine are open, whether the server has
    accepted them or not.
    """
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(remote == f"0100007F:{port:04X}" for _, _, remote, *_ in lines)


def test_a_busy_store_gets_no_second_connection(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each connection, torch's server looks up the client's name in DNS, in its only thread:
    seconds, where DNS is slow.
    """
    monkeypatch.setattr(meeting_places, "ANSWER_S", 0.2)
    with serve_store() as server:
        assert server.stdout is not None
        place = Store("127.0.0.1", int(server.stdout.readline()))
        try:
            first, second = meet(0, [place]), meet(1, [place])
            assert eventually(lambda: first.lost(0) and second.lost(0)), (
                "both have heard each other twice"
            )
            server.send_signal(signal.SIGSTOP)
            late = meet(2, [place])
            assert eventually(lambda: first.lost_store and connections(place.port) == 3)
            time.sleep(10 * meeting_places.ANSWER_S)
            assert connections(place.port) == 3
            server.send_signal(signal.SIGCONT)
            assert eventually(lambda: len(late.others) == 2 and not first.lost_store), (
                "all meet again"
            )
            assert connections(place.port) == 3
            for node in (first, second, late):
                node.leave()
        finally:
            server.kill()


def test_a_store_that_ends_is_told_apart_from_one_that_is_slow(meet: Meet, tmp_path: Path) -> None:
    """The store ends with the process that serves it, here rank 0's: the kernel then refuses
    connections.
    """
    with serve_store() as server:
        assert server.stdout is not None
        place = Store("127.0.0.1", int(server.stdout.readline()))
        first, second = meet(0, [place]), meet(1, [place])
        assert eventually(lambda: first.others and second.lost(0)), "it has been heard twice"
        assert second.lost_store is None
        report = LostStoreReport()
        rank = member(tmp_path, 1)
        assert rank.status is not None
        assert report.take_line(second, [rank]) == ""
        server.kill()
    ended = time.monotonic()
    asked = threading.Thread(target=lambda: first.gather(as_it_is, timeout_s=15))
    asked.start()
    lost = eventually(lambda: second.lost_store)
    assert eventually(lambda: not second.others) and lost.place == place
    assert report.take_line(second, [rank]) == "", "the rank may end with it"
    rank.status = msgspec.structs.replace(rank.status, issued=rank.status.issued + 1)
    asked.join(5)
    assert not asked.is_alive(), "nobody can answer any more"
    assert second.sentences_on_lost() == [
        f"Of rank 0 on other nodes nothing is known: {place} has ended."
    ]
    line = eventually(lambda: report.take_line(second, [rank]))
    assert time.monotonic() - ended < 5
    assert (
        line
        == f"{place}, which node host0 (rank 0) served, has ended: it refuses connections. Nothing"
        " is known any more of rank 0 on host0. Here, rank 1 is in all_reduce #10 of the"
        " default group [0-3]."
    )
    assert report.take_line(second, [rank]) == "", "once"
    rank.status = msgspec.structs.replace(rank.status, phase=layout.PHASE_LEFT)
    assert eventually(lambda: second.lost_store.silent_s > 1)
    assert LostStoreReport().take_line(second, [rank]) == "", (
        "it has destroyed its groups: the job is over"
    )
