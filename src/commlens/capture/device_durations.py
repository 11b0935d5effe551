"""How long collectives and messages took on the device, as torch's own recorder measured them.

With ``TORCH_NCCL_ENABLE_TIMING=1``, torch's watchdog thread keeps the duration of each collective
that has ended. commlens reads the durations from the recorder's entries, every 5 s or less often: a
reading keeps the GIL, and may take at most 0.1% of the time. A reading also queries the CUDA events
of the collectives in flight, as torch's watchdog does all the time. A query breaks the capture of a
CUDA graph, so commlens never reads again in a process that captures one. For backends with
completion hooks, the hooks report durations.

torch numbers the messages of a backend as they are issued, a batch as one of them. They are counted
here; an entry of another kind under the same number is not taken.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from commlens.blackbox import layout as L
from commlens.capture import torch_progress
from commlens.tap.token import Token

EVERY_NS: Final = 5_000_000_000
TIME_SHARE: Final = 0.001  # of the time, which readings may take at most
_LEAST: Final = 10  # collectives without a duration, below which nothing is read


class _Untimed(NamedTuple):
    """A record of a collective whose duration is not known yet.

    ``key`` is torch's: a kind of entry, and a number. torch numbers the messages of a backend, and
    its collectives, each from 1 on.
    """

    key: torch_progress.EntryKey
    offset: int
    record: int


class DeviceDurations:
    """The collectives of a rank whose durations on the device are to be read.

    Args:
        writer: of the rank's black box (:class:`commlens.blackbox.writer.BoxWriter`).
        read: returns each backend's durations in ns by its ``uid``.
    """

    def __init__(
        self,
        writer: Any,
        read: Callable[[], torch_progress.Durations] = torch_progress.durations,
    ) -> None:
        self._writer = writer
        self._read = read
        self._untimed: dict[str, collections.deque[_Untimed]] = {}
        self._messages: collections.Counter[str] = collections.Counter()  # issued, by ``uid``
        self._due_ns = 0
        # of the newest readings: while the machine is busy, some take much longer
        self._took_ns: collections.deque[int] = collections.deque(maxlen=3)
        # on ROCm, each reading also dumps every communicator
        self._off = bool(getattr(torch.version, "hip", None))

    def add(self, token: Token) -> None:
        """Add a collective that was enqueued on a device."""
        kind = "coalesced" if token.args.op == "coalesced" else "alone"
        self._add(token, (kind, token.backend_number))

    def add_message(self, token: Token) -> None:
        """Add a message, or the record that closes a batch of them. Each must be added, in the
        order in which they are issued.
        """
        uid = token.args.channel.backend.uid
        self._messages[uid] += 1
        kind = "batch" if token.args.op == "coalesced" else token.args.op
        self._add(token, (kind, self._messages[uid]))

    def _add(self, token: Token, key: torch_progress.EntryKey) -> None:
        if not self._off:
            uid = token.args.channel.backend.uid
            queue = self._untimed.get(uid)
            if queue is None:
                size = min(self._writer.capacity, torch_progress.capacity())
                queue = self._untimed[uid] = collections.deque(maxlen=size)
            queue.append(_Untimed(key, token.offset, token.index))

    def end(self) -> None:
        """Read nothing any more: the process captures a CUDA graph."""
        self._off = True
        self._untimed.clear()

    def look(self, now: int, reading: threading.Lock) -> None:
        """Read the durations and record them, if that is due.

        Args:
            now: monotonic ns.
            reading: held while torch's recorder is read.
        """
        if self._off or now < self._due_ns or sum(map(len, self._untimed.values())) < _LEAST:
            return
        began = time.thread_time_ns()
        with reading:
            if self._off:  # a capture has begun meanwhile
                return
            found = self._read()
        # other threads may add a backend meanwhile, or begin a capture
        for uid, queue in list(self._untimed.items()):
            self._record(queue, found.get(uid, {}))
        self._writer.word(L.TIMED, now)
        self._took_ns.append(time.thread_time_ns() - began)
        # At moments that all ranks of a host share: only what all have read can be compared, and
        # rings of busy jobs hold a few seconds.
        interval = EVERY_NS
        while interval < min(self._took_ns) / TIME_SHARE:
            interval *= 2
        self._due_ns = (now // interval + 1) * interval

    def _record(
        self, queue: collections.deque[_Untimed], known: dict[torch_progress.EntryKey, int]
    ) -> None:
        """Record the known durations of a backend. Forget the records that are older than all known
        ones of their kind: torch's ring has overwritten their entries.
        """
        oldest: dict[str, int] = {}
        for kind, number in known:
            oldest[kind] = min(number, oldest.get(kind, number))
        for _ in range(len(queue)):
            each = queue.popleft()
            duration = known.get(each.key)
            if duration is not None:
                self._writer.mark_value(each.offset, L.DURATION, each.record, duration // L.TICK_NS)
            elif each.key[1] > oldest.get(each.key[0], 0):
                queue.append(each)
