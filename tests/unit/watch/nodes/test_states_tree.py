"""The tree in which nodes join the states of their ranks."""

from __future__ import annotations

import pytest

from commlens.watch.nodes import states_tree
from commlens.watch.nodes.states import States
from commlens.watch.nodes.states_tree import Collecting, Tree


@pytest.fixture(autouse=True)
def two_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_tree, "ARITY", 2)


def collect(tree: Tree, slot: int) -> Collecting:
    return Collecting((0, 1), tree, tree.children(slot), began=100.0, until=150.0, period_s=0.2)


@pytest.mark.parametrize("first", [0, 20])
def test_each_node_has_one_parent(first: int) -> None:
    tree = Tree(first, first + 13)
    children = [child for slot in range(first, first + 13) for child in tree.children(slot)]
    assert sorted(children) == list(range(first + 1, first + 13))


def test_children_of_nodes_that_have_gone_move_up() -> None:
    assert Tree(0, 13, (1, 4)).children(0) == [3, 9, 10, 2]


def test_a_node_that_comes_back_below_the_first_slot_has_no_children() -> None:
    tree = Tree(20, 33)
    for slot in (0, 18, 19):
        assert tree.children(slot) == []
        assert tree.levels_below(slot) == 0


def test_a_node_waits_longer_the_more_levels_are_below_it() -> None:
    tree = Tree(0, 13)
    assert [tree.levels_below(slot) for slot in (0, 1, 3, 6, 12)] == [3, 2, 1, 0, 0]
    waits = [tree.patience_s(slot, 0.2) for slot in (0, 1, 3, 7)]
    assert waits == sorted(waits, reverse=True) and len(set(waits)) == 4


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
    assert not root.is_complete(149.0)
    assert root.is_complete(150.1)


def test_it_ends_although_the_nodes_own_watcher_never_answers() -> None:
    leaf = collect(Tree(0, 3), 2)
    assert not leaf.is_complete(149.0)
    assert leaf.is_complete(150.1)
    leaf.has_own = True
    assert leaf.is_complete(101.0)
