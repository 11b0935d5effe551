"""Answers to ``commlens status`` on another node: what this node's ranks are doing, as of the
moment when it asked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from commlens.watch.nodes.beat import key
from commlens.watch.nodes.collecting import LOOK_STATES, Collecting
from commlens.watch.nodes.meeting_places import Client, stored
from commlens.watch.nodes.states import States
from commlens.watch.nodes.states_tree import Tree

log = logging.getLogger("commlens")

LOOK: Final = 1 << 32
"""Added to the counter of nodes by each ``commlens status``, so that a watcher at rest learns of it
without another request.
"""
_ASKER: Final = -2  # in place of the slot of a node that asks
_KEPT: Final = 8  # of the newest questions
_TRIES: Final = 8  # a question is stored just after it is counted


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What a command asks the nodes for."""

    number: int  # of the look
    slots: list[int] = []  # of the nodes that are asked; empty: all
    records: int = 0  # newest records of each rank
    # of the states of all ranks, in place of records: the tree in which the nodes join them
    tree: Tree | None = None

    @property
    def request(self) -> tuple[int, int]:
        """The request that the states in the tree answer."""
        return (_ASKER, self.number)


class Look(msgspec.Struct, frozen=True):
    """A node's answer."""

    number: int  # of the newest look that it answers
    evidence: bytes


def store_ask(client: Client, ask: Ask) -> None:
    """Store what is asked; it is sent with the next request."""
    client.set(key("ask", ask.number % _KEPT), msgspec.msgpack.encode(ask))


def _read_asks(client: Client, numbers: range) -> list[Ask]:
    """Return what is asked by these numbers, as far as it is stored."""
    found: list[Ask] = []
    for value in stored(client, "ask", [number % _KEPT for number in numbers]).values():
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.msgpack.decode(value, type=Ask))
    return sorted((ask for ask in found if ask.number in numbers), key=lambda ask: ask.number)


class Looks:
    """Takes and keeps this node's answers to ``commlens status``.

    Args:
        take: returns this node's evidence, packed, with so many of the newest records of each rank;
            called in a thread of its own, because it takes a while.
        take_states: returns the states of this node's ranks; called like ``take``.
        ready: called in that thread when the answer is there.
    """

    def __init__(
        self,
        take: Callable[[int], bytes],
        take_states: Callable[[], States],
        ready: Callable[[], None],
    ) -> None:
        self._take = take
        self._take_states = take_states
        self._ready = ready
        # of the last look that was seen; -1: none yet, those before are answered by nobody
        self._number = -1
        self._tries = 0  # to read the next one
        self._thread: threading.Thread | None = None
        self._answer: Look | None = None
        self._states: States | None = None  # of this node's ranks
        self._collecting: Collecting | None = None  # from the nodes below in the tree

    @property
    def is_collecting(self) -> bool:
        """Whether answers of nodes below in the tree are on their way."""
        return self._collecting is not None

    def see(self, client: Client, counter: int, slot: int, period_s: float) -> None:
        """Begin to answer if a command has asked this node since the last call.

        Args:
            client: of the meeting place.
            counter: the counter of nodes.
            slot: of this node.
            period_s: between two looks of a node at the values of others.
        """
        number, before = counter // LOOK, self._number
        if number == before or (self._thread is not None and self._thread.is_alive()):
            return
        # several commands may have asked since; another store counts anew
        last = before if before < number else number - 1
        new = range(max(last, number - _KEPT) + 1, number + 1)
        asks = _read_asks(client, new) if before >= 0 else []
        self._tries += 1
        is_complete = bool(asks) and asks[-1].number == number
        if not is_complete and before >= 0 and self._tries < _TRIES:
            return
        self._number, self._tries = number, 0
        asks = [ask for ask in asks if not ask.slots or slot in ask.slots]
        if not asks:
            return
        joins = [ask for ask in asks if ask.tree is not None]
        if joins:
            self._collect_for(joins[-1], slot, period_s)
        self._thread = threading.Thread(
            target=self._look, args=(asks,), name="commlens-look", daemon=True
        )
        self._thread.start()

    def _collect_for(self, ask: Ask, slot: int, period_s: float) -> None:
        """Begin to collect the states of the ranks below this node in the tree."""
        assert ask.tree is not None
        began = time.monotonic()
        self._states = None
        self._collecting = Collecting(
            ask.request,
            ask.tree,
            ask.tree.children(slot),
            kind=LOOK_STATES,
            began=began,
            until=began + ask.tree.patience_s(slot, period_s),
            period_s=period_s,
        )

    def store(self, client: Client, slot: int) -> None:
        """Store what is ready: the records of this node's ranks, or the states of all ranks below
        it in the tree.
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            client.set(key("look", slot), msgspec.msgpack.encode(answer))
        collecting = self._collecting
        if collecting is None:
            return
        states, self._states = self._states, None
        if states is not None:
            collecting.add_own(states)
        for other, of_others in collecting.read(client):
            collecting.add(other, of_others)
        if collecting.is_complete(time.monotonic()):
            collecting.store(client, slot)
            self._collecting = None

    def _look(self, asks: Sequence[Ask]) -> None:
        """Answer: one answer with the most records is for all that asked for records."""
        records = [ask for ask in asks if ask.tree is None]
        try:
            if len(records) < len(asks):
                self._states = self._take_states()
            if records:
                most = max(ask.records for ask in records)
                self._answer = Look(records[-1].number, self._take(most))
        except Exception as error:  # never harm the watcher
            log.debug(
                "commlens: a look at this node's ranks failed: %s: %s", type(error).__name__, error
            )
            return
        self._ready()
