"""What a node collects of the nodes below it in the tree."""

from __future__ import annotations

import pytest

from commlens.watch.nodes import states_tree
from commlens.watch.nodes.beat import Request
from commlens.watch.nodes.states import Collecting, States
from commlens.watch.nodes.states_tree import Tree


@pytest.fixture(autouse=True)
def two_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_tree, "ARITY", 2)


def collect(tree: Tree, slot: int) -> Collecting:
    return Collecting(Request(1, 0, tree=tree), slot, began=100.0, period_s=0.2)


def test_the_children_of_a_node_that_does_not_answer_are_read_in_its_place() -> None:
    tree = Tree(0, 13)
    root = collect(tree, 0)
    assert root.to_read(100.0) == [1, 2]
    root.add(2, States({b"same": 0b100}))
    late = 100.0 + tree.patience_s(1, 0.2) + 0.1
    assert root.to_read(late) == [1, 3, 4], "it may still answer"
    assert not root.is_complete(late)
    root.has_own = True
    for slot in (3, 4, 1):
        root.add(slot, States({b"same": 1 << slot}))
    assert root.is_complete(late)
    assert root.sum.ranks == {1, 2, 3, 4}


def test_it_ends_although_a_node_never_answers() -> None:
    root = collect(Tree(0, 3), 0)
    root.has_own = True
    until = 100.0 + Tree(0, 3).patience_s(0, 0.2)
    assert not root.is_complete(until - 0.1)
    assert root.is_complete(until + 0.1)


def test_it_ends_although_the_nodes_own_watcher_never_answers() -> None:
    leaf = collect(Tree(0, 3), 2)
    until = 100.0 + Tree(0, 3).patience_s(2, 0.2)
    assert not leaf.is_complete(until - 0.1)
    assert leaf.is_complete(until + 0.1)
    leaf.has_own = True
    assert leaf.is_complete(101.0)
