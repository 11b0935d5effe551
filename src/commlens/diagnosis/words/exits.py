"""How processes ended, in words."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.index.process_exit import ProcessExit
from commlens.text import verb

_ONE = (0,)  # any rank: the verb is singular


def exit_words(end: ProcessExit, ranks: Sequence[int] = _ONE) -> str:
    """Return what a process did: ``"died of SIGKILL"``, ``"exited with status 3"``, ``"raised
    ValueError: ..."``.

    Args:
        end: how it ended.
        ranks: that ended so, which is the subject of the verb.
    """
    signal, was = end.signal or "a signal", verb(ranks, "was", "were")
    match end.how:
        case "runs":
            return verb(ranks, "runs", "run")
        case "shuts-down":
            return f"{verb(ranks, 'is', 'are')} shutting down"
        case "finished":
            return "finished"
        case "is-gone":
            gone = verb(ranks, "is gone; how it", "are gone; how they")
            return f"{gone} ended was not observed"
        case "raised":
            return f"raised {'DistributedOperationException' if end.refused else end.error}"
        case "interrupted":
            return f"{was} interrupted"
        case "perhaps-interrupted":
            its = verb(ranks, "its", "their")
            return f"{was} interrupted: by SIGINT, or {its} program raised KeyboardInterrupt"
        case "out-of-memory":
            return f"{was} killed by the kernel's OOM killer ({signal})"
        case "ended-by-signal":
            return f"{was} ended by {signal}"
        case "aborted-by-watchdog":
            watchdog = f"NCCL's watchdog ({signal})"
            return f"{was} aborted by {watchdog}, which gave up waiting for a collective"
        case "died":
            leaving = verb(ranks, "it was", "they were")
            exiting = f" while {leaving} exiting" if end.was_exiting else ""
            return f"died of {signal}{exiting}{_after(end)}"
        case "ended" | "failed":
            return f"{end.how}{_after(end)}{_left(end, ranks)}"
        case "exited":
            if end.signal:
                return f"{was} killed by {end.signal}{_after(end)}{_left(end, ranks)}"
            return f"exited with status {end.status}{_after(end)}{_left(end, ranks)}"


def _after(end: ProcessExit) -> str:
    error = "a DistributedOperationException" if end.refused else end.error
    return f" after {error}" if error else ""


def _left(end: ProcessExit, ranks: Sequence[int]) -> str:
    if not end.was_exiting:
        return ""
    had, its = verb(ranks, "it had", "they had"), verb(ranks, "its", "their")
    return f" after {had} destroyed {its} last process group"
