"""What a rank of this node is doing, and how it ended, from outside of its process. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import read_box
from commlens.errors import FormatError
from commlens.text import frame_phrase

SILENT_AFTER_S: Final = 1.0  # four heartbeats of the watchdog thread


def whereabouts(folder: Path, rank: int, pid: int) -> str:
    """Return what a rank is doing; "" if unknown. The rank's watchdog thread recorded the line of
    its main thread.
    """
    if job_dirs.stat_fields(pid)[0] in "Tt":
        return "is stopped by a signal"
    try:
        box = read_box(folder / job_dirs.box_name(rank, pid))
    except (OSError, FormatError):
        return ""
    silent_s = (box.captured_ns - box.heartbeat_ns) / 1e9 if box.heartbeat_ns else 0.0
    if silent_s > SILENT_AFTER_S:
        return f"has run no Python code for {silent_s:.0f} s (is the GIL held?)"
    main = box.main_stack
    newest = max((op.announced_ns for op in box.collectives[-1:]), default=0)
    if main is None or main.taken_ns < newest:
        return ""  # the stack is older than its newest collective
    frame = main.source
    return f"is in {frame_phrase(frame)}" if frame is not None else ""


def waits_in_store(folder: Path, rank: int, pid: int) -> bool:
    """Return whether a rank waits for a key in a store."""
    try:
        return read_box(folder / job_dirs.box_name(rank, pid)).store_wait is not None
    except (OSError, FormatError):
        return False
