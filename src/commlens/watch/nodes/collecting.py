"""What a node of the tree has collected of the states of the nodes below it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from commlens.watch.nodes.beat import key
from commlens.watch.nodes.meeting_places import Client, stored
from commlens.watch.nodes.states import States, pack_states, unpack_states
from commlens.watch.nodes.states_tree import Tree

STATES: Final = "states"
"""The kind of value that answers the node that reports."""
LOOK_STATES: Final = "look-states"
"""The kind of value that answers ``commlens status``."""


class Collecting:
    """What a node collects for one request.

    Args:
        request: slot and number of the request.
        tree: of the request.
        slots: of the nodes to collect from.
        kind: of the values that they store.
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
        kind: str = STATES,
        began: float,
        until: float,
        period_s: float,
    ) -> None:
        self.request = request
        self.sum = States({})
        self.has_own = False  # the states of the node that collects were added
        self._tree = tree
        self._kind = kind
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

    def add_own(self, states: States) -> None:
        """Add the states of this node's own ranks."""
        self.sum.add(states)
        self.has_own = True

    def read(self, client: Client) -> list[tuple[int, States]]:
        """Return what nodes have stored since, each with its slot, to be added."""
        found: list[tuple[int, States]] = []
        for slot, value in stored(client, self._kind, self.to_read(time.monotonic())).items():
            states = unpack_states(value, self.request)
            if states is not None:
                found.append((slot, states))
        return found

    def store(self, client: Client, slot: int) -> None:
        """Store the sum, as the answer of the node with this slot."""
        client.set(key(self._kind, slot), pack_states(self.sum, self.request))
        client.get([])  # send it

    def add(self, slot: int, states: States) -> None:
        """Add what a node stored."""
        self._waits_for.discard(slot)
        self.sum.add(states)

    def is_complete(self, now: float) -> bool:
        """Return whether there is nothing more to wait for: all have answered, this node's own
        watcher among them, or it is too late.
        """
        return now > self._until or (self.has_own and not self._waits_for)
