"""What a node of the tree has collected of the states of the nodes below it."""

from __future__ import annotations

from collections.abc import Iterable

from commlens.watch.nodes.states import States
from commlens.watch.nodes.states_tree import Tree


class Collecting:
    """What a node collects for one request.

    Args:
        request: slot and number of the request.
        tree: of the request.
        slots: of the nodes to collect from.
        began: ``time.monotonic()`` at which the request was seen.
        until: when there is nothing more to wait for.
        period_s: between two looks of a node at the values of others.
    """

    def __init__(
        self,
        request: tuple[int, int],
        tree: Tree,
        slots: Iterable[int],
        *,
        began: float,
        until: float,
        period_s: float,
    ) -> None:
        self.request = request
        self.sum = States({})
        self.has_own = False  # the states of the node that collects were added
        self._tree = tree
        self._began = began
        self._until = until
        self._period_s = period_s
        self._waits_for = set(slots)
        self._moved_up: set[int] = set()  # their children were asked in their place

    def to_read(self, now: float) -> list[int]:
        """Return the slots of the nodes whose values to read now."""
        for slot in sorted(self._waits_for - self._moved_up):
            if now > self._began + self._tree.patience_s(slot, self._period_s):
                self._moved_up.add(slot)
                self._waits_for.update(self._tree.children(slot))
        return sorted(self._waits_for)

    def add(self, slot: int, states: States) -> None:
        """Add what a node stored."""
        self._waits_for.discard(slot)
        self.sum.add(states)

    def is_complete(self, now: float) -> bool:
        """Return whether there is nothing more to wait for: all have answered, this node's own
        watcher among them, or it is too late.
        """
        return now > self._until or (self.has_own and not self._waits_for)
