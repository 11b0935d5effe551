"""How nodes of a large job, which rest for long between two exchanges, reach each other sooner.

The node that reports *wakes* a node by setting the key that the node waits for in the store. A node
*calls* the node that reports by writing its slot into a ring of 64 keys, ``call/0`` to ``call/63``,
with a counter: that node reads the ring in each exchange, and then the beats of those that called.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Iterable
from typing import Final

from commlens.watch.nodes.beat import key
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
    """Let the node that reports read the value of the node with this slot."""
    number = client.add(key("calls"), 1)
    client.set(key("call", number % _KEPT), str(slot).encode())
    client.get([])  # send it


class Calls:
    """The calls that the node that reports gets."""

    def __init__(self) -> None:
        self._number = 0  # of the newest call that was taken

    def take(self, client: Client) -> set[int]:
        """Return the slots of the nodes that have called since; of many calls, the newest."""
        number = client.add(key("calls"), 0)
        new = range(max(self._number, number - _KEPT) + 1, number + 1)
        self._number = number
        calls = stored(client, "call", [each % _KEPT for each in new])
        return {int(slot) for slot in calls.values() if slot.isdigit()}
