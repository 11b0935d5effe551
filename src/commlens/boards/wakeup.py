"""Wake-ups between the ranks of a job on one node. Standard library only.

A rank that waits for a peer sleeps on that peer's bell: a word of shared memory that changes with
each announcement of the peer. Each rank has two words in a page that all ranks of the job on this
node share: its bell, and the bell that it sleeps on. Without memory fences a wake-up may be missed,
so no sleep is long.

A sleep is a Linux futex, by its system call. Without it (another processor, a sandbox that forbids
the call), sleeps are short naps and the caller polls.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import platform
import sys
import threading
import time
from collections.abc import Iterable
from typing import Final

FIRST_WORD: Final = 8
LAST_WORD: Final = 512  # of a page of 4096 bytes
LONGEST_NS: Final = 20_000_000  # of one sleep, after which the caller checks its condition again
_PLACES: Final = (LAST_WORD - FIRST_WORD) // 2
_SEVERAL: Final = (1 << 64) - 1  # threads of the rank sleep on different bells

_FUTEX_NUMBERS: Final = {
    "x86_64": 202,
    "aarch64": 98,
    "arm64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE: the word is shared by processes
_POLL_S: Final = 50e-6
_ALL_SLEEPERS: Final = 1 << 30


class _BellWords:
    """The words of all bells: the first page of a shared, writable map."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._words = memoryview(mapped)[: LAST_WORD * 8].cast("Q")
        self._futexes = Futexes(mapped)

    def wake(self, ranks: Iterable[int]) -> None:
        """Wake these ranks of this node, whichever bell they sleep on: a refusal was posted."""
        for bell in {self._words[_bell(rank) + 1] for rank in ranks}:
            if FIRST_WORD <= bell < LAST_WORD:
                self._futexes.wake(bell)


class Bells(_BellWords):
    """The bells of a job's ranks on this node, as one of the ranks uses them."""

    def __init__(self, mapped: mmap.mmap, rank: int) -> None:
        super().__init__(mapped)
        self._own = _bell(rank)
        self._next = itertools.count(self._words[self._own] + 1).__next__
        self._lock = threading.Lock()
        self._sleepers: dict[int, int] = {}  # thread: the bell it sleeps on
        self._words[self._own + 1] = 0

    def ring(self, peers: Iterable[int]) -> None:
        """Wake those peers that sleep on this rank's bell: it has announced something."""
        words, own = self._words, self._own
        words[own] = self._next()
        for peer in peers:
            sleeps_on = words[_bell(peer) + 1]
            if sleeps_on in (own, _SEVERAL):
                self._futexes.wake(own)
                return

    def listen(self, peer: int, thread: int) -> int:
        """Register this thread as a sleeper on the peer's bell, and return the bell's value.

        Check the awaited condition once more before :meth:`sleep`, since the bell may have rung in
        between.
        """
        bell = _bell(peer)
        with self._lock:
            self._sleepers[thread] = bell
            self._words[self._own + 1] = bell if len(self._sleepers) == 1 else _SEVERAL
        return self._words[bell]

    def sleep(self, peer: int, heard: int) -> None:
        """Sleep until the peer's bell rings, for 20 ms at most; not at all if it no longer has the
        value ``heard``.
        """
        self._futexes.wait(_bell(peer), heard, LONGEST_NS)

    def awake(self, thread: int) -> None:
        """Unregister this thread as a sleeper."""
        with self._lock:
            self._sleepers.pop(thread, None)
            left = set(self._sleepers.values())
            self._words[self._own + 1] = (
                0 if not left else left.pop() if len(left) == 1 else _SEVERAL
            )


class RemoteBells(_BellWords):
    """The bells as the node's relay uses them: it rings for the ranks on other nodes, and sleeps on
    the bells of the ranks here.
    """

    def add(self, rank: int) -> None:
        """Make the ranks here ring for each announcement that concerns a rank on another node."""
        self._words[_bell(rank) + 1] = _SEVERAL

    def ring(self, rank: int) -> None:
        """Wake the ranks here that wait for a rank on another node."""
        bell = _bell(rank)
        self._words[bell] = (self._words[bell] + 1) & _SEVERAL
        self._futexes.wake(bell)

    def heard(self, rank: int) -> int:
        """Return the value of a rank's bell, which changes with each announcement."""
        return self._words[_bell(rank)]

    def sleep(self, rank: int, heard: int, timeout_ns: int) -> None:
        """Sleep until the bell of a rank on this node no longer has this value."""
        self._futexes.wait(_bell(rank), heard, timeout_ns)


def _bell(rank: int) -> int:
    """Return the index of a rank's bell; ranks share bells on a node with more than 252 of them."""
    return FIRST_WORD + rank % _PLACES * 2


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futexes:
    """Futexes in a shared, writable map, which must outlive this object. Each is the lower half of
    a word of 8 bytes.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._lower_half = 4 if sys.byteorder == "big" else 0
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        call.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint32,
        )
        self._call = call
        self._number = _FUTEX_NUMBERS.get(platform.machine(), 0)
        # a word without sleepers is woken, which shows whether the system allows it
        self.works = bool(
            self._number and call(self._number, self._base, _WAKE, 1, None, None, 0) >= 0
        )

    def wait(self, word: int, expected: int, timeout_ns: int) -> None:
        """Sleep until the word is woken or the timeout is over; not at all if the word is no longer
        ``expected``.
        """
        if not self.works:
            time.sleep(min(_POLL_S, timeout_ns / 1e9))
            return
        timeout = _Timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000)
        # The result does not matter: the caller checks its condition again.
        self._call(
            self._number,
            self._base + word * 8 + self._lower_half,
            _WAIT,
            ctypes.c_uint32(expected & 0xFFFFFFFF),
            ctypes.byref(timeout),
            None,
            0,
        )

    def wake(self, word: int) -> None:
        """Wake all threads, of all processes, that sleep on the word."""
        if self.works:
            self._call(
                self._number,
                self._base + word * 8 + self._lower_half,
                _WAKE,
                _ALL_SLEEPERS,
                None,
                None,
                0,
            )
