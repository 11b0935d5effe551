"""How nodes of a large job, which rest for long between two exchanges, reach each other sooner.

The node that reports *wakes* a node by setting the key that the node waits for in the store. A node
*calls* the node that reports by writing its slot into a ring of 64 keys, with a counter: that node
reads the ring in each exchange, and then the beats of those that called. For example, a rank of
node 7 has died, and node 0 reports::

    commlens/calls     3     before; node 7 adds 1
    commlens/call/4    7     node 7 writes its slot; node 0 reads calls 4 to 4, then node 7's beat
    commlens/wake/12         node 0, which now asks node 12 for evidence, wakes it
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable, Iterable
from typing import Final

from commlens.watch.nodes.beat import Beat, key
from commlens.watch.nodes.meeting_places import Client, stored

_KEPT: Final = 64  # keys in the ring of calls


class Poke:
    """Like :class:`threading.Event`, with a descriptor that can be read once it is set."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def set(self) -> None:
        """Let all waits end."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Let waits wait again."""
        if self.is_set():
            os.eventfd_read(self._descriptor)

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set. Returns whether it is."""
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        return bool(waiting.poll(1000 * timeout_s))


def wake_key(slot: int) -> str:
    """Return the key that wakes a node that rests."""
    return key("wake", slot)


def wake(client: Client, slots: Iterable[int]) -> None:
    """Wake nodes; it is sent with the next request."""
    for slot in slots:
        client.set(wake_key(slot), b"")


def call(client: Client, slot: int) -> None:
    """Let the node that reports read the beat of the node with this slot."""
    number = client.add(key("calls"), 1)
    client.set(key("call", number % _KEPT), str(slot).encode())
    client.get([])  # send it


class Calls:
    """The calls that this node gets and makes. Only the thread of the exchange uses it."""

    def __init__(self) -> None:
        self.slots: set[int] = set()  # of the nodes whose calls were taken last
        self._number = 0  # of the newest call that was taken
        self._called_about = (0, 0)  # this node's dead ranks and wait when it called
        self._woke_for = (0, 0)  # the request and the news for which this node woke the others

    def take(self, client: Client) -> None:
        """As the node that reports, note the nodes that have called since; of many, the newest."""
        number = client.add(key("calls"), 0)
        new = range(max(self._number, number - _KEPT) + 1, number + 1)
        self._number = number
        calls = stored(client, "call", [each % _KEPT for each in new])
        self.slots = {int(slot) for slot in calls.values() if slot.isdigit()}

    def wake_others(self, client: Client, mine: Beat, others: Callable[[], Iterable[Beat]]) -> None:
        """As the node that reports, wake the nodes that it asks, once for each request, or all if
        it has news. ``others`` returns the beats of all.
        """
        asked, news = mine.asked, mine.news[-1].number if mine.news else 0
        asks = asked.number if asked is not None else 0
        if (asks, news) != self._woke_for:
            # news are for all; a request may be for a few
            only = asked.nodes if asked is not None and news == self._woke_for[1] else []
            self._woke_for = (asks, news)
            wake(client, only or [beat.slot for beat in others()])

    def call_reporter(self, client: Client, mine: Beat, reporter: Beat | None) -> None:
        """Let the node that reports read this node's beat soon if it shows a death, or a wait while
        that node knows of none. None: this node reports.
        """
        if reporter is None:
            return
        # of a wait that the reporter knows of, no call is needed
        wait = mine.wait_id if not reporter.wait_id else self._called_about[1]
        if (len(mine.dead), wait) != self._called_about:
            self._called_about = (len(mine.dead), wait)
            if mine.dead or wait:
                call(client, mine.slot)
