"""The tree in which nodes join the states of their ranks."""

from __future__ import annotations

import pytest

from commlens.watch.nodes import states_tree
from commlens.watch.nodes.states_tree import Tree


@pytest.fixture(autouse=True)
def two_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_tree, "ARITY", 2)


@pytest.mark.parametrize("first", [0, 20])
def test_each_node_has_one_parent(first: int) -> None:
    tree = Tree(first, first + 13)
    children = [child for slot in range(first, first + 13) for child in tree.children(slot)]
    assert sorted(children) == list(range(first + 1, first + 13))


def test_children_of_nodes_that_have_gone_move_up() -> None:
    assert Tree(0, 13, (1, 4)).children(0) == [3, 9, 10, 2]


def test_slots_between_those_of_living_nodes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tree.of({4, 6, 7}, 9) == Tree(4, 9, (5, 8))
    assert Tree.of({4, 9}, 9) == Tree(4, 10, (5, 6, 7, 8)), "one has just drawn its number"
    assert Tree.of(set(), 9) is None
    monkeypatch.setattr(states_tree, "_GONE_MAX", 3)
    assert Tree.of({4, 9}, 9) is None


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
