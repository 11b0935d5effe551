"""Nodes that rest for long, how they are woken, and how they call the node that reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from chosen import long

from commlens.watch.nodes import bundles, exchange, known_nodes, periods
from commlens.watch.nodes.beat import LAST
from commlens.watch.nodes.calls import Calls, Poke, call
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.meeting_places import Folder, Place, Store
from commlens.watch.nodes.states import States
from commlens.watch.other_nodes import AskedNodes

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.launches  # serves a store, and waits for real periods
COUNT = 8
AT_ONCE_S = 10.0  # the nodes of these tests rest for 80 s


def eventually(condition: Callable[[], Any], timeout_s: float = AT_ONCE_S) -> Any:
    end = time.monotonic() + timeout_s
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return result


@pytest.fixture(
    params=["store", long("folder")]
)  # test_meeting_places_folder.py has the same calls
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Place]:
    if request.param == "folder":
        yield Folder(tmp_path / "meet")
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Store("127.0.0.1", store.port)


@pytest.fixture
def nodes(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Nodes]]:
    """Nodes that know each other, and rest."""
    monkeypatch.setattr(exchange, "waits", lambda _: [])
    monkeypatch.setattr(exchange, "places", lambda *_: [place])
    monkeypatch.setattr(known_nodes, "READ_ALL_NODES", 3)
    for module in (bundles, exchange):
        monkeypatch.setattr(module, "BUNDLES_ABOVE", 3)
    made = [Nodes(f"host{rank}", lambda: None) for rank in range(COUNT)]
    for rank, node in enumerate(made):
        meet(node, rank)
        assert eventually(lambda of=node: of._mine.slot >= 0)
    assert eventually(lambda: len(made[0].others) == COUNT - 1 and made[-1].reporter, 30)
    for name in ("_REST_NODES", "_WOKEN_NODES"):
        monkeypatch.setattr(periods, name, 0.1)
    time.sleep(3 * periods.PERIOD_S)  # they see that they are many
    yield made
    for node in made:
        node.leave()


def meet(node: Nodes, rank: int) -> None:
    status = SimpleNamespace(initialised=True)
    member: Any = SimpleNamespace(rank=rank, world_size=COUNT, alive=True, status=status)
    node.meet([member], dict)


def test_the_store_has_nothing_to_do_while_nodes_rest(nodes: list[Nodes]) -> None:
    before = [node._mine.count for node in nodes]
    time.sleep(3)
    after = [node._mine.count for node in nodes]
    assert after[-1] == before[-1], "it would not be next"
    assert after[0] > before[0]
    assert len(nodes[0].others) == COUNT - 1 and nodes[-1].reporter
    assert nodes[0].lost(2.0) == []


def test_nodes_that_are_asked_are_woken(nodes: list[Nodes]) -> None:
    first, last = nodes[0], nodes[-1]
    slot = last._mine.slot
    found: list[Any] = []
    asking = threading.Thread(
        target=lambda: found.append(
            first.gather(lambda _, content: content, of=[slot], timeout_s=AT_ONCE_S)
        )
    )
    asking.start()
    request = eventually(last.take_request)
    last.answer(request, b"evidence")
    assert eventually(lambda: found) == [({slot: b"evidence"}, [])]
    asking.join()
    asking = threading.Thread(target=lambda: found.append(first.gather_states(States({b"s": 1}))))
    asking.start()
    left = set(range(1, COUNT))

    def answer() -> bool:
        for rank in sorted(left):
            if (request := nodes[rank].take_request()) is not None:
                nodes[rank].answer(request, States({b"s": 1 << rank}))
                left.discard(rank)
        return len(found) == 2

    assert eventually(answer)
    assert found[1].ranks == set(range(COUNT))
    asking.join()


def test_a_command_wakes_the_nodes_that_it_asks(nodes: list[Nodes], place: Place) -> None:
    if isinstance(place, Folder):
        pytest.skip("nodes that meet in a folder are not asked")
    last = nodes[-1]
    last._status_answers._take = lambda _: b"evidence"
    client = place.open(lambda _: False)
    asked = AskedNodes(client, [0])
    found, silent = asked.gather(lambda _, content: content, of=[last._mine.slot], records=64)
    client.close()
    assert found == {last._mine.slot: b"evidence"} and silent == []


def test_a_death_is_told_at_once(nodes: list[Nodes]) -> None:
    last = nodes[-1]
    last.answer(LAST, b"evidence")
    last.update(dead=[COUNT - 1])
    assert eventually(lambda: nodes[0].dead_elsewhere) == [COUNT - 1]


def test_a_long_wait_is_told_at_once_and_a_short_one_is_not(
    nodes: list[Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(age_s: float) -> None:
        since_ns = time.monotonic_ns() - int(age_s * 1e9)
        waiting = SimpleNamespace(kind="collective", since_ns=since_ns)
        monkeypatch.setattr(exchange, "waits", lambda _: [waiting])
        for _ in range(3):
            meet(nodes[-1], COUNT - 1)
            time.sleep(0.3)

    wait(1.0)
    time.sleep(2)
    assert nodes[0].waits(time.monotonic_ns()) == []
    wait(5.0)
    (told,) = eventually(lambda: nodes[0].waits(time.monotonic_ns()))
    assert 4.5 < (time.monotonic_ns() - told.since_ns) / 1e9 < 5.0 + AT_ONCE_S


def test_calls_are_taken_once(place: Place) -> None:
    client = place.open(lambda _: False)
    calls = Calls()

    def taken() -> set[int]:
        calls.take(client)
        return calls.slots

    assert taken() == set()
    for slot in (7, 9):
        call(client, slot)
    assert taken() == {7, 9}
    assert taken() == set()
    for slot in range(100):
        call(client, slot)
    assert taken() == set(range(36, 100))
    client.close()


def test_a_poke_can_be_waited_for() -> None:
    poke = Poke()
    assert not poke.wait(0.01)
    poke.set()
    poke.set()
    assert poke.is_set() and poke.wait(10)
    poke.clear()
    assert not poke.is_set()
