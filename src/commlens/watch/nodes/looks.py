"""Answers to ``commlens status`` on another node: what this node's ranks are doing, as of the
moment when it asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import msgspec

log = logging.getLogger("commlens")

LOOK: Final = 1 << 32
"""Added to the counter of nodes by each ``commlens status``, so that a watcher at rest learns of it
without another request.
"""


class Look(msgspec.Struct, frozen=True):
    """A node's answer."""

    number: int  # of the newest look that it answers
    evidence: bytes


class Looks:
    """Takes and keeps this node's answers to ``commlens status``.

    Args:
        take: returns this node's evidence, packed; called in a thread of its own, because it takes
            a while.
        ready: called in that thread when the answer is there.
    """

    def __init__(self, take: Callable[[], bytes], ready: Callable[[], None]) -> None:
        self._take = take
        self._ready = ready
        # of the last look that was seen; -1: none yet, those before are answered by nobody
        self._number = -1
        self._thread: threading.Thread | None = None
        self._answer: Look | None = None

    def see(self, counter: int) -> None:
        """Begin to answer if somebody has looked since the last call.

        Args:
            counter: the counter of nodes.
        """
        number, before = counter // LOOK, self._number
        if number != before and (self._thread is None or not self._thread.is_alive()):
            self._number = number
            if before >= 0:
                self._thread = threading.Thread(
                    target=self._look, args=(number,), name="commlens-look", daemon=True
                )
                self._thread.start()

    def pop(self) -> bytes | None:
        """Return the answer, once."""
        answer, self._answer = self._answer, None
        return msgspec.msgpack.encode(answer) if answer is not None else None

    def _look(self, number: int) -> None:
        try:
            self._answer = Look(number, self._take())
        except Exception as error:  # never harm the watcher
            log.debug(
                "commlens: a look at this node's ranks failed: %s: %s", type(error).__name__, error
            )
            return
        self._ready()
