"""The clock that late processes are judged by: time in which a process was ready to run and no core
took it does not count. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from commlens.processes import process

# limits, after which a process that hardly ever gets a core is given up, too
STARVED: Final = 4


class ReadyClock:
    """Measures time from its creation. A process's waits for a core are subtracted from when it was
    first watched; ``/proc`` is read then, and at a limit.
    """

    def __init__(self) -> None:
        self._began_ns = time.monotonic_ns()
        # by pid: when it was first watched, and its threads' times until then
        self._waits: dict[int, tuple[int, dict[int, process.CoreTimes]]] = {}

    def watch(self, pids: Collection[int]) -> None:
        """Count for these processes, too."""
        for pid in pids:
            if pid not in self._waits:
                self._waits[pid] = time.monotonic_ns(), process.core_times(pid)

    def is_over(
        self, limit_ns: float, pids: Collection[int], passed_ns: float | None = None
    ) -> bool:
        """Return whether each of these processes could have run for ``limit_ns``, or ``STARVED``
        times that has passed.

        Args:
            limit_ns: the longest time.
            pids: the processes that are late.
            passed_ns: the time that has passed; by default since this clock was made.
        """
        if passed_ns is None:
            passed_ns = time.monotonic_ns() - self._began_ns
        if passed_ns <= limit_ns or passed_ns > STARVED * limit_ns:
            return passed_ns > limit_ns
        self.watch(pids)
        without_core_ns = 0
        for pid in pids:
            since_ns, before = self._waits[pid]
            watched_ns = time.monotonic_ns() - since_ns
            # the longest wait of one of its threads: a thread that waits for another sleeps
            here_ns = process.longest_cpu_wait_ns(before, process.core_times(pid), watched_ns)
            without_core_ns = max(without_core_ns, here_ns)
        return passed_ns - without_core_ns >= limit_ns
