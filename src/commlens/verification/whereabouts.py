"""The activities of this node's ranks, seen from outside of their processes. No torch."""

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
        watch: whether there is time to watch a rank that runs no Python code. Else it is unknown
            why.
    """
    found = {
        rank: "is stopped by a signal" if job_dirs.stat_fields(pid)[0] in "Tt" else ""
        for rank, pid in pids.items()
    }
    logs = {rank: log for rank in pids if not found[rank] and (log := _log(folder, rank, pids))}
    silent = {rank: log for rank, log in logs.items() if _silent_s(log) > SILENT_S}
    found |= {rank: _line(log) for rank, log in logs.items() if rank not in silent}
    if silent and watch:
        found |= _watch(folder, {rank: pids[rank] for rank in silent})
    return found


def _log(folder: Path, rank: int, pids: Mapping[int, int]) -> RankLog | None:
    try:
        return read_box(folder / job_dirs.box_name(rank, pids[rank]))
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
    """Watch ranks without heartbeats, as a watcher does: only of a rank that could run and does
    not, another thread holds the GIL.
    """
    observer, clock = Observer(use_py_spy=False), ReadyClock()
    clock.watch(pids.values())
    for pid in pids.values():
        observer.add(pid, job_dirs.start_ticks(pid))
    while True:
        logs = {rank: log for rank in pids if (log := _log(folder, rank, pids)) is not None}
        now = time.monotonic_ns()
        for rank, log in logs.items():
            observer.sample(pids[rank], Pulse(heartbeat_ns=now - int(_silent_s(log) * 1e9)))
        silent = [pids[rank] for rank, log in logs.items() if _silent_s(log) > SILENT_S]
        if not silent or clock.is_over(_WATCHED_NS, silent):
            break
        time.sleep(_SAMPLE_EVERY_S)
    return {
        rank: _line(log)
        if pids[rank] not in silent
        else f"has run no Python code for {_silent_s(log):.0f} s (is the GIL held?)"
        if observer.observe(pids[rank]).holds_gil
        else ""
        for rank, log in logs.items()
    }


def waits_in_store(folder: Path, rank: int, pid: int) -> bool:
    """Return whether a rank waits for a key in a store."""
    try:
        return read_box(folder / job_dirs.box_name(rank, pid)).store_wait is not None
    except (OSError, FormatError):
        return False
