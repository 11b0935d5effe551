"""The tree in which the nodes join the states of their ranks, so that the node that reports reads
one value.

The slots that the nodes drew are the tree: each has up to ``ARITY`` children, whose slots follow
from its own. Each node adds what its children have stored to its own states, and stores the sum. If
a child is lost, its children move up: the node reads their values in its place. Adding a value
twice changes nothing, so no node has to know what another one decided.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

import msgspec

_OF_TESTS: Final = os.environ.get("COMMLENS_TEST_TREE_ARITY", "")
ARITY: Final = int(_OF_TESTS or 32)
TREE_ABOVE: Final = 0 if _OF_TESTS else 16
"""The number of other nodes up to which all are asked for all their records."""
_GONE_MAX: Final = 256  # slots of nodes that have gone, between those of nodes that live
FIRST_S: Final = 3.0
"""The time within which a node without children answers, once it sees the request."""
LEVEL_S: Final = 2.0  # for each level of the tree below a node


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """The shape of the tree, which the node that reports sends with its request."""

    first: int  # lowest slot of this incarnation of the job: the root
    count: int  # of slots drawn
    lost: tuple[int, ...] = ()  # slots of nodes that do not answer

    @classmethod
    def of(cls, slots: Collection[int], count: int) -> Tree | None:
        """Return the tree of the nodes with these slots; None if there are none, or too many slots
        between theirs are of nodes that have gone.

        Args:
            slots: of the nodes that live.
            count: how many nodes ever drew a number, as far as is known.
        """
        if not slots:
            return None
        first, count = min(slots), max(count, max(slots) + 1)
        gone = sorted(set(range(first, count)).difference(slots))
        return cls(first, count, tuple(gone)) if len(gone) <= _GONE_MAX else None

    def children(self, slot: int) -> list[int]:
        """Return the slots of a node's children; in place of one that is lost, its children. A node
        that was lost when the tree was made, and is back, may have a slot below the first one.
        """
        if slot < self.first:
            return []
        low = self.first + (slot - self.first) * ARITY + 1
        found: list[int] = []
        for child in range(low, min(low + ARITY, self.count)):
            found += self.children(child) if child in self.lost else [child]
        return found

    def levels_below(self, slot: int) -> int:
        """Return the number of levels below a node."""
        levels, place = 0, slot - self.first
        while place >= 0 and (place := place * ARITY + 1) < self.count - self.first:
            levels += 1
        return levels

    def patience_s(self, slot: int, period_s: float) -> float:
        """Return how long after the request a node stores its sum at the latest.

        Args:
            slot: of the node.
            period_s: between two looks of a node at the values of others.
        """
        return period_s + FIRST_S + LEVEL_S * self.levels_below(slot)
