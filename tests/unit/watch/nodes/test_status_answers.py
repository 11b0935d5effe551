"""A node's answers to commands."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest

from commlens.watch.nodes import status_answers as module
from commlens.watch.nodes.beat import QUESTION, Request, key
from commlens.watch.nodes.states import States, unpack_states
from commlens.watch.nodes.states_tree import Tree
from commlens.watch.nodes.status_answers import StatusAnswer, StatusAnswers, store_request


class Store:
    """Values in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def existing_keys(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.values]

    def get(self, names: Sequence[str]) -> list[bytes]:
        return [self.values[name] for name in names]


class Node:
    """A node of which the ranks are looked at."""

    def __init__(self, store: Store, slot: int = 5) -> None:
        self.store, self.slot = store, slot
        self.ready = threading.Event()
        self.answers = StatusAnswers(
            lambda records: f"{records} records".encode(),
            lambda: States({b"same": 1 << slot}),
            self.ready.set,
        )
        self.see(2)

    def see(self, number: int) -> bool:
        """Exchange with the store. Returns whether it looked at its ranks."""
        self.ready.clear()
        counter = number * QUESTION + 40
        self.answers.see(self.store, counter, self.slot, 1.0)  # type: ignore[arg-type]
        thread = self.answers._thread
        if thread is not None:
            thread.join(20)
        self.answers.store(self.store, self.slot)  # type: ignore[arg-type]
        return self.ready.is_set()

    def ask(self, ask: Request) -> bool:
        store_request(self.store, ask)  # type: ignore[arg-type]
        return self.see(ask.number)


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_node_that_is_asked_answers_once(store: Store) -> None:
    node = Node(store)
    assert not node.see(2), "it was asked before it came"
    assert node.ask(Request(3, nodes=[4, 5], records=64))
    assert msgspec.msgpack.decode(store.values[key("look", 5)], type=StatusAnswer) == StatusAnswer(
        3, b"64 records"
    )
    assert not node.see(3)
    assert not node.ask(Request(4, nodes=[6], records=64)), "another node is asked"
    assert node.ask(Request(5, records=8)), "all are asked"


def test_commands_that_ask_at_the_same_time_are_all_answered(store: Store) -> None:
    node = Node(store)
    tree = Tree(5, 6)
    for ask in (
        Request(3, nodes=[5], records=64),
        Request(4, nodes=[5, 6], records=8),
        Request(5, tree=tree),
        Request(6, nodes=[6], records=99),
    ):
        store_request(store, ask)  # type: ignore[arg-type]
    assert node.see(6)
    assert msgspec.msgpack.decode(store.values[key("look", 5)], type=StatusAnswer) == StatusAnswer(
        4, b"64 records"
    )
    states = unpack_states(store.values[key("look-states", 5)], Request(5).id)
    assert states is not None and states.by_key == {b"same": 1 << 5}


def test_another_store_counts_anew(store: Store) -> None:
    node = Node(store)
    assert node.ask(Request(7, nodes=[5], records=64))
    store.values.clear()
    assert node.ask(Request(1, nodes=[5], records=8))


def test_a_question_may_be_stored_after_it_was_counted(store: Store) -> None:
    node = Node(store)
    assert not node.see(3)
    assert node.ask(Request(3, nodes=[5], records=64))


def test_a_question_that_never_comes_is_not_waited_for(store: Store) -> None:
    node = Node(store)
    for _ in range(module._TRIES):
        assert not node.see(3)
    store_request(store, Request(3, nodes=[5], records=64))  # type: ignore[arg-type]
    assert not node.see(3)
    assert node.ask(Request(4, nodes=[5], records=64))


def test_the_states_are_stored_with_those_of_the_nodes_below(store: Store) -> None:
    tree, number = Tree(4, 6), 3
    root, leaf = Node(store, 4), Node(store, 5)
    store_request(store, Request(number, tree=tree))  # type: ignore[arg-type]
    assert root.see(number) and root.answers.is_collecting
    name = key("look-states", 4)
    assert name not in store.values
    leaf.see(number)
    root.see(number)
    assert not root.answers.is_collecting
    states = unpack_states(store.values[name], Request(number).id)
    assert states is not None and states.by_key == {b"same": 1 << 4 | 1 << 5}


def test_a_look_that_fails_harms_nobody(store: Store) -> None:
    node = Node(store)
    node.answers._take = lambda _: 1 // 0  # type: ignore[assignment,return-value]
    assert not node.ask(Request(3, nodes=[5], records=64))
    assert key("look", 5) not in store.values
