"""This node's answers to ``commlens status`` on another node: what its ranks are doing, as of the
moment when the command asked.

A command adds ``QUESTION`` to the counter of nodes, which every watcher reads anyway, and stores
its request under ``ask/NUMBER``; the answers are under ``look/SLOT``. Only the newest eight
requests are kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from commlens.watch.nodes.beat import QUESTION, Request, decoded, key
from commlens.watch.nodes.meeting_places import Client, stored
from commlens.watch.nodes.states import Collecting, States

log = logging.getLogger("commlens")

_KEPT: Final = 8  # of the newest requests
_TRIES: Final = 8  # calls of see() for a counted request, which a command stores just after


class StatusAnswer(msgspec.Struct, frozen=True):
    """A node's answer."""

    number: int  # of the newest request that it answers
    evidence: bytes


def store_request(client: Client, request: Request) -> None:
    """Store a command's request; the client sends it with its next call."""
    client.set(key("ask", request.number % _KEPT), msgspec.msgpack.encode(request))


def _read_requests(client: Client, numbers: range) -> list[Request]:
    """Return the requests with these numbers, as far as they are stored."""
    values = stored(client, "ask", [number % _KEPT for number in numbers]).values()
    found = [request for value in values if (request := decoded(value, Request)) is not None]
    return sorted((each for each in found if each.number in numbers), key=lambda each: each.number)


class StatusAnswers:
    """Takes and keeps this node's answers to ``commlens status``. The exchange of nodes calls
    :meth:`see`, then :meth:`store`, in each of its rounds.

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
        # the number of the newest request that was seen; -1 until the first call: requests from
        # before this watcher began are not answered
        self._number = -1
        self._tries = 0  # to read the next request
        self._thread: threading.Thread | None = None  # takes the evidence
        self._answer: StatusAnswer | None = None  # to be stored
        self._collecting: Collecting | None = None  # states from the nodes below in the tree

    @property
    def is_collecting(self) -> bool:
        """Whether answers of nodes below in the tree are on their way."""
        return self._collecting is not None and not self._collecting.is_done

    def see(self, client: Client, counter: int, slot: int, period_s: float) -> None:
        """Begin to answer if a command has asked this node since the last call.

        Args:
            client: of the meeting place.
            counter: the counter of the meeting place: nodes in its low 32 bits, requests above.
            slot: of this node.
            period_s: between two rounds of a node's exchange.
        """
        number, before = counter // QUESTION, self._number
        if number == before or (self._thread is not None and self._thread.is_alive()):
            return
        if before < 0:
            self._number = number
            return
        # several commands may have asked since; in another store, numbers begin anew
        last = before if before < number else number - 1
        new = range(max(last, number - _KEPT) + 1, number + 1)
        requests = _read_requests(client, new)
        self._tries += 1
        is_there = any(request.number == number for request in requests)
        if not is_there and self._tries < _TRIES:
            return  # the command has counted its request, and stores it in a moment
        self._number, self._tries = number, 0
        requests = [request for request in requests if request.concerns(slot)]
        for request in requests:
            if request.tree is not None:
                began = time.monotonic()
                self._collecting = Collecting(request, slot, began=began, period_s=period_s)
        if requests:
            self._thread = threading.Thread(
                target=self._answer_requests, args=(requests,), name="commlens-look", daemon=True
            )
            self._thread.start()

    def store(self, client: Client, slot: int) -> None:
        """Store what is ready: the records of this node's ranks, or the states of all ranks below
        it in the tree.
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            client.set(key("look", slot), msgspec.msgpack.encode(answer))
        if self._collecting is not None and not self._collecting.is_done:
            self._collecting.collect(client)

    def _answer_requests(self, requests: Sequence[Request]) -> None:
        """Take the evidence for these requests. All that ask for records get one answer, with as
        many records as any of them asks for.
        """
        for_records = [request for request in requests if request.tree is None]
        try:
            if self._collecting is not None and len(for_records) < len(requests):
                self._collecting.add_own(self._take_states())
            if for_records:
                most = max(request.records for request in for_records)
                self._answer = StatusAnswer(for_records[-1].number, self._take(most))
        except Exception as error:  # never harm the watcher
            log.debug(
                "commlens: a look at this node's ranks failed: %s: %s", type(error).__name__, error
            )
            return
        self._ready()
