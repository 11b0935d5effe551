"""How long collectives took on the device, as torch's own recorder measured them.

With ``TORCH_NCCL_ENABLE_TIMING=1``, torch's watchdog thread keeps the duration of each collective
that has ended. They are read from the recorder's entries, every 5 s or less often: a reading keeps
the GIL, and may take at most 0.1% of the time. A reading also queries the events of what is in
flight, as torch's watchdog does all the time. That breaks the capture of a CUDA graph, so a process
that captures one is never read again. Backends with completion hooks tell durations by them.
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
    """A record of a collective whose duration is not known yet."""

    number: int  # of the backend
    is_coalesced: bool
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
        self._due_ns = 0
        # of the newest readings: while the machine is busy, some take much longer
        self._took_ns: collections.deque[int] = collections.deque(maxlen=3)
        # on ROCm, each reading also dumps every communicator
        self._off = bool(getattr(torch.version, "hip", None))

    def add(self, token: Token) -> None:
        """Add a collective that was enqueued on a device."""
        if not self._off:
            uid = token.args.channel.backend.uid
            queue = self._untimed.get(uid)
            if queue is None:
                size = min(self._writer.capacity, torch_progress.capacity())
                queue = self._untimed[uid] = collections.deque(maxlen=size)
            is_coalesced = token.args.op == "coalesced"
            queue.append(_Untimed(token.backend_number, is_coalesced, token.offset, token.index))

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
        for uid, queue in self._untimed.items():
            self._record(queue, found.get(uid, {}))
        self._took_ns.append(time.thread_time_ns() - began)
        # At moments that all ranks of a host share: only what all have read can be compared, and
        # rings of busy jobs hold a few seconds.
        interval = EVERY_NS
        while interval < min(self._took_ns) / TIME_SHARE:
            interval *= 2
        self._due_ns = (now // interval + 1) * interval

    def _record(
        self, queue: collections.deque[_Untimed], known: dict[tuple[int, bool], int]
    ) -> None:
        """Record the known durations of a backend, and forget what is older than all of them."""
        oldest = min(known, default=(0, False))[0]
        for _ in range(len(queue)):
            each = queue.popleft()
            duration = known.get((each.number, each.is_coalesced))
            if duration is not None:
                self._writer.mark_value(each.offset, L.DURATION, each.record, duration // L.TICK_NS)
            elif each.number > oldest:
                queue.append(each)
