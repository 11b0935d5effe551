"""The state of a rank's process, and its words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from commlens.model.ranklog import End, RankLog
from commlens.text import exit_phrase

State = Literal[
    "running",
    "sleeping",
    "computing",
    "idle",
    "unseen",
    "uninterruptible",
    "holds-gil",
    "debugged",
    "stopped",
    "finished",
    "gone",
    "failed",
    "killed",
]
UNREMARKABLE: Final[tuple[State, ...]] = ("running", "sleeping", "computing", "idle", "unseen")
"""States that do not explain why a rank does not move."""

_ENDED: Final[Mapping[End, State]] = {
    End.KILLED: "killed",
    End.FAILED: "failed",
    End.CLEAN: "finished",
    End.GONE: "gone",
    End.UNKNOWN: "unseen",
}
_KERNEL: Final[Mapping[str, State]] = {"S": "sleeping", "D": "uninterruptible", "I": "idle"}
_COMPUTING: Final = 0.5  # of a core


def process_state(log: RankLog) -> State:
    """Return the state of a rank's process."""
    seen = log.observation
    if seen.end in _ENDED:
        return _ENDED[seen.end]
    if seen.is_stopped:
        return "debugged" if seen.proc_state == "t" else "stopped"
    if seen.holds_gil:
        return "holds-gil"
    if seen.cpu_s and seen.window_s and seen.cpu_s / seen.window_s > _COMPUTING:
        return "computing"
    return _KERNEL.get(seen.proc_state or "", "running")


def process_words(log: RankLog) -> str:
    """Return the state of a rank's process in words."""
    seen, state = log.observation, process_state(log)
    match state:
        case "killed":
            return f"killed by {seen.signal}"
        case "failed":
            if seen.exit_code is None:
                return "died of an exception"
            return exit_phrase(seen.exit_code)
        case "unseen":
            return "not visible from here"
        case "debugged":
            return "stopped by a debugger"
        case "holds-gil":
            return "holds the GIL"
        case "uninterruptible":
            return "in uninterruptible I/O"
    return state


def notable_state(log: RankLog) -> str:
    """Return the state of a rank's process in words if it explains why the rank does not move;
    otherwise an empty text.
    """
    return "" if process_state(log) in UNREMARKABLE else process_words(log)
