"""The state of a rank's process in words."""

from __future__ import annotations

from commlens.model.ranklog import End, Observation, RankLog
from commlens.text import exit_phrase

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible I/O",
    "I": "idle",
}


def process_words(log: RankLog) -> str:
    """Return the state of a rank's process in words."""
    seen: Observation = log.observation
    if seen.end is End.KILLED:
        return f"killed by {seen.signal}"
    if seen.end is End.FAILED:
        return exit_phrase(seen.exit_code) if seen.exit_code is not None else "died of an exception"
    if seen.end in (End.CLEAN, End.GONE, End.UNKNOWN):
        return {End.CLEAN: "finished", End.GONE: "gone", End.UNKNOWN: "not visible from here"}[
            seen.end
        ]
    if seen.is_stopped:
        return "stopped by a debugger" if seen.proc_state == "t" else "stopped"
    if seen.holds_gil:
        return "holds the GIL"
    if seen.cpu_s and seen.window_s and seen.cpu_s / seen.window_s > 0.5:
        return "computing"
    return _STATES.get(seen.proc_state or "", "running")


def notable_state(log: RankLog) -> str:
    """Return the state of a rank's process in words if it explains why the rank does not move;
    otherwise an empty text.
    """
    words = process_words(log)
    return (
        ""
        if words in ("running", "sleeping", "computing", "idle", "not visible from here")
        else words
    )
