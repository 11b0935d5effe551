"""The activities of this node's ranks, seen from outside of their processes, for the error that a
verification raises. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import read_box
from commlens.errors import FormatError
from commlens.model.ranklog import RankLog
from commlens.processes.observer import SILENT_S, Observer, Pulse
from commlens.text import frame_phrase
from commlens.verification.ready_clock import ReadyClock

_WATCHED_NS: Final = 1_000_000_000
"""How long ranks are watched whose watchdog threads do not run: they may have no core."""
_SAMPLE_EVERY_S: Final = 0.1


def whereabouts(folder: Path, pids: Mapping[int, int], *, watch: bool = True) -> dict[int, str]:
    """Return the activity of each rank, by rank; "" if unknown. A rank's watchdog thread recorded
    the line of its main thread.

    Args:
        folder: the job's folder of black boxes.
        pids: the ranks' processes.
        watch: whether to watch ranks that run no Python code, for a second of the time in which
            they could; if not, their activity stays unknown.
    """
    found = {
        rank: "is stopped by a signal" if job_dirs.stat_fields(pid)[0] in "Tt" else ""
        for rank, pid in pids.items()
    }
    logs = {
        rank: log
        for rank, pid in pids.items()
        if not found[rank] and (log := _log(folder, rank, pid)) is not None
    }
    silent = {rank: log for rank, log in logs.items() if _silent_s(log) > SILENT_S}
    found |= {rank: _line(log) for rank, log in logs.items() if rank not in silent}
    if silent and watch:
        found |= _watch(folder, {rank: pids[rank] for rank in silent})
    return found


def _log(folder: Path, rank: int, pid: int) -> RankLog | None:
    try:
        return read_box(folder / job_dirs.box_name(rank, pid))
    except (OSError, FormatError):
        return None


def _silent_s(log: RankLog) -> float:
    return (log.captured_ns - log.heartbeat_ns) / 1e9 if log.heartbeat_ns else 0.0


def _line(log: RankLog) -> str:
    main = log.main_stack
    newest = max((op.announced_ns for op in log.collectives[-1:]), default=0)
    if main is None or main.taken_ns < newest:
        return ""  # the stack is older than its newest collective
    return f"is in {frame_phrase(main.source)}" if main.source is not None else ""


def _watch(folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """Watch ranks without heartbeats, and return the activity of each. A rank that gets a core and
    still runs no Python code waits for the GIL; one that gets no core proves nothing.
    """
    observer, clock = Observer(use_py_spy=False), ReadyClock()
    clock.watch(pids.values())
    for pid in pids.values():
        observer.add(pid, job_dirs.start_ticks(pid))
    while True:
        logs = {
            rank: log for rank, pid in pids.items() if (log := _log(folder, rank, pid)) is not None
        }
        now = time.monotonic_ns()
        for rank, log in logs.items():
            heartbeat = now - int(_silent_s(log) * 1e9)  # on the clock of this process
            observer.sample(pids[rank], Pulse(heartbeat_ns=heartbeat))
        silent = [pids[rank] for rank, log in logs.items() if _silent_s(log) > SILENT_S]
        if not silent or clock.is_over(_WATCHED_NS, silent):
            break
        time.sleep(_SAMPLE_EVERY_S)
    found = {rank: _line(log) for rank, log in logs.items() if pids[rank] not in silent}
    for rank in logs.keys() - found:
        silent_s = _silent_s(logs[rank])
        held = f"has run no Python code for {silent_s:.0f} s (is the GIL held?)"
        found[rank] = held if observer.observe(pids[rank]).holds_gil else ""
    return found


def waits_in_store(folder: Path, rank: int, pid: int) -> bool:
    """Return whether a rank waits for a key in a store."""
    log = _log(folder, rank, pid)
    return log is not None and log.store_wait is not None
