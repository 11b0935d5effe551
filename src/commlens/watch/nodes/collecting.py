"""The states that a node of the tree collects from the nodes below it."""

from __future__ import annotations

import threading
import time
from typing import Final

from commlens.watch.nodes.beat import COMMAND, Request, key
from commlens.watch.nodes.meeting_places import Client, stored
from commlens.watch.nodes.states import States, pack_states, unpack_states
from commlens.watch.nodes.states_tree import LEVEL_S

STATES: Final = "states"
"""The kind of value that answers the node that reports."""
LOOK_STATES: Final = "look-states"
"""The kind of value that answers ``commlens status``."""


class Collecting:
    """The states collected for one request. Its methods may be called from any thread.

    Args:
        request: for the states of all ranks.
        slot: of the node that collects; None: the requester collects, and reads the root's sum.
        began: ``time.monotonic()`` at which the request was seen.
        period_s: between two looks of a node at the values of others.
    """

    def __init__(
        self, request: Request, slot: int | None, *, began: float, period_s: float
    ) -> None:
        assert request.tree is not None
        self.request = request
        self.sum = States()
        self.has_own = slot is None  # the states of the node that collects were added
        self.is_done = False  # all is collected and, by a node of the tree, stored
        self._tree = tree = request.tree
        self._slot = slot
        self._kind = LOOK_STATES if request.slot == COMMAND else STATES
        self._began = began
        self._until = (
            began + LEVEL_S + tree.patience_s(tree.first, period_s)
            if slot is None
            else began + tree.patience_s(slot, period_s)
        )
        self._period_s = period_s
        self._waits_for = {tree.first} if slot is None else set(tree.children(slot))
        self._moved_up: set[int] = set()  # their children were asked in their place
        self._lock = threading.Lock()

    def to_read(self, now: float) -> list[int]:
        """Return the slots of the nodes whose values to read now."""
        for slot in sorted(self._waits_for - self._moved_up):
            if now > self._began + self._tree.patience_s(slot, self._period_s):
                self._moved_up.add(slot)
                self._waits_for.update(self._tree.children(slot))
        return sorted(self._waits_for)

    def add_own(self, states: States) -> None:
        """Add the states of this node's own ranks."""
        with self._lock:
            self.sum.add(states)
        self.has_own = True

    def add(self, slot: int, states: States) -> None:
        """Add the states that a node stored."""
        self._waits_for.discard(slot)
        with self._lock:
            self.sum.add(states)

    def collect(self, client: Client) -> None:
        """Add the states that nodes have stored since, and store the sum once no node is waited
        for.
        """
        for slot, value in stored(client, self._kind, self.to_read(time.monotonic())).items():
            states = unpack_states(value, self.request.id)
            if states is not None:
                self.add(slot, states)
        self.is_done = self.is_complete(time.monotonic())
        if self.is_done and self._slot is not None:
            client.set(key(self._kind, self._slot), pack_states(self.copy(), self.request.id))
            client.get([])  # send it

    def is_complete(self, now: float) -> bool:
        """Return whether no node is waited for any longer: all have answered, this node's own
        watcher among them, or it is too late.
        """
        return now > self._until or (self.has_own and not self._waits_for)

    def copy(self) -> States:
        """Return a copy of the states collected so far."""
        copy = States()
        with self._lock:
            copy.add(self.sum)
        return copy
