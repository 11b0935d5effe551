"""Open handles on a job's ranks while the watcher still imports its modules, so that a rank that
dies meanwhile is not missed.

The imports take a quarter of a second. This module therefore imports little itself.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.processes.process import Handle, are_running_under_torchrun

_PERIOD_S: Final = 0.01


class EarlyHandles:
    """Opens a handle on each process that has a black box in a folder and notes how it ends, in a
    thread, until :meth:`stop`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[int, Handle] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="commlens-early-handles", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Open no further handles."""
        self._stopped.set()
        self._thread.join()

    def take(self, pid: int, start_ticks: int) -> Handle | None:
        """Return the handle on a process, after :meth:`stop`; None if there is none."""
        handle = self._handles.get(pid)
        if handle is None or not handle.exists or handle.start_ticks != start_ticks:
            return None
        return self._handles.pop(pid)

    def close(self) -> None:
        """Close the handles that were not taken."""
        self.stop()
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for pid in map(job_dirs.box_pid, job_dirs.boxes(self._folder)):
                if pid not in self._handles:
                    self._handles[pid] = Handle(pid, job_dirs.start_ticks(pid))
            # On Linux before 6.15, how a process ended is known only until its parent reaps it.
            running = [pid for pid, handle in self._handles.items() if not handle.ended_ns]
            ended = [pid for pid in running if self._handles[pid].ending() is not None]
            if len(ended) == 1:
                others = [pid for pid in running if pid not in ended]
                self._handles[ended[0]].ended_alone = len(running) == len(
                    self._handles
                ) and are_running_under_torchrun(others)
            self._stopped.wait(_PERIOD_S)
