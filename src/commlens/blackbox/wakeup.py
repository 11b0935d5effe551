"""Ranks wake each other: who waits for a peer sleeps until that peer announces something. Standard library only.

Two words for each rank, in the page that all ranks of the job on this node share: its bell, which changes with each of its
announcements, and whose bell it sleeps on. Without memory fences a wake may be missed: nobody sleeps for long.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterable
from typing import Final

from commlens.blackbox.futex import Futexes

FIRST_WORD: Final = 8
LAST_WORD: Final = 512  # of a page of 4096 bytes
LONGEST_NS: Final = 20_000_000  # a sleep; then one looks again, woken or not
_PLACES: Final = (LAST_WORD - FIRST_WORD) // 2
_ANY: Final = (1 << 64) - 1  # threads of the rank sleep on several


class Bells:
    """The bells of a job on this node, as one of its ranks uses them."""

    def __init__(self, mapped: mmap.mmap, rank: int) -> None:
        """Use the first page of a shared, writable map."""
        self._words = memoryview(mapped)[: LAST_WORD * 8].cast("Q")
        self._futexes = Futexes(mapped)
        self._mine = _bell(rank)
        self._next = itertools.count(self._words[self._mine] + 1).__next__
        self._lock = threading.Lock()
        self._sleepers: dict[int, int] = {}  # by thread: whose bell it sleeps on
        self._words[self._mine + 1] = 0

    def ring(self, peers: Iterable[int]) -> None:
        """This rank has announced something: wake those of the peers who sleep on its bell."""
        words, mine = self._words, self._mine
        words[mine] = self._next()
        for peer in peers:
            sleeps_on = words[_bell(peer) + 1]
            if sleeps_on in (mine, _ANY):
                self._futexes.wake(mine)
                return

    def wake(self, ranks: Iterable[int]) -> None:
        """Wake these ranks, on whichever bell they sleep: there is something else to look at."""
        for bell in {self._words[_bell(rank) + 1] for rank in ranks}:
            if bell != _ANY and FIRST_WORD <= bell < LAST_WORD:
                self._futexes.wake(bell)

    def listen(self, peer: int, thread: int) -> int:
        """Say that this thread is about to sleep on the peer's bell. Look once more for what is waited for, then :meth:`sleep`."""
        bell = _bell(peer)
        with self._lock:
            self._sleepers[thread] = bell
            self._words[self._mine + 1] = bell if len(self._sleepers) == 1 else _ANY
        return self._words[bell]

    def sleep(self, peer: int, heard: int) -> None:
        """Sleep until the peer's bell rings, unless it has since ``listen`` returned ``heard``; for 20 ms at most."""
        self._futexes.wait(_bell(peer), heard, LONGEST_NS)

    def awake(self, thread: int) -> None:
        """This thread does not sleep any more."""
        with self._lock:
            self._sleepers.pop(thread, None)
            left = set(self._sleepers.values())
            self._words[self._mine + 1] = 0 if not left else left.pop() if len(left) == 1 else _ANY


def _bell(rank: int) -> int:
    """The place of a rank's bell: one of its own, unless a node has more than 252."""
    return FIRST_WORD + rank % _PLACES * 2
