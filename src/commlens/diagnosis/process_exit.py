"""How each process ended, and whether of its own cause or because another one did."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from commlens.matching.error_texts import is_mismatch_error, is_peer_error, is_refusal
from commlens.model.collective import Frame, State, user_frame
from commlens.model.ranklog import End, RankLog
from commlens.model.verdict import Why

Kind = Literal["alive", "leaving", "clean", "own", "peer", "told", "gone"]
"""``own``: of its own cause. ``peer``: because a peer ended or a wait timed out. ``told``: stopped by the launcher or a user.
``gone``: ended, and nobody knows how. ``leaving``: it said goodbye and its process still exists, so its exit status is not known yet."""

_TOLD = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
_TOLD_CODES = frozenset({143, 130, 129, -15, -2, -1})
_LATE_KILL_NS = 5_000_000_000


class Fate(msgspec.Struct):
    """A process's end, or that it has none."""

    kind: Kind
    why: Why = "unknown"
    at_ns: int = 0  # Unix ns; 0: not known
    text: str = ""  # "died of SIGKILL", "exited with status 3", "raised ValueError: ..."
    source: Frame | None = None  # the user's line that raised
    says_disagreement: bool = False  # its error is one that ranks which do not fit cause
    refused: bool = False  # strict verification refused a collective to it

    @property
    def ended(self) -> bool:
        """Whether the process has ended, in whatever way."""
        return self.kind not in ("alive", "leaving")

    @property
    def failed(self) -> bool:
        """Whether it ended badly."""
        return self.kind not in ("alive", "leaving", "clean")


def fate_of(log: RankLog) -> Fate:
    """Read one rank's end from its box and from what was observed."""
    seen = log.observation
    end = seen.end
    at = seen.ended_ns or (log.heartbeat_ns if end is not End.RUNNING else 0)
    exception = log.exception
    if exception is None and not log.closed and end in (End.RUNNING, End.UNKNOWN):
        return Fate("alive")
    if exception is None and end is End.RUNNING:
        return Fate("leaving", "finished", 0, "is shutting down")
    if end is End.CLEAN or (exception is None and end is End.UNKNOWN):
        return Fate("clean", "finished", at, "finished")
    if exception is not None and end is not End.KILLED:
        return _by_exception(log, exception, at)
    if end is End.KILLED:
        return _by_signal(log, at)
    failure = _last_failure(log)
    if end is End.GONE:
        if is_peer_error(failure):
            return Fate("peer", "exception", at, f"ended after {_short(failure)}")
        if log.closed:
            return Fate("clean", "finished", at, "finished")
        return Fate("gone", "unknown", at, "is gone; how it ended was not observed")
    text = f"exited with status {seen.exit_code}" if seen.exit_code is not None else "failed"
    if is_refusal(failure):
        return Fate("peer", "exception", at, f"{text} after a DistributedOperationException", refused=True)
    if seen.exit_code in _TOLD_CODES:
        return Fate("told", "killed", at, text)
    if is_peer_error(failure):
        return Fate("peer", "exception", at, f"{text} after {_short(failure)}")
    return Fate("own", "exit", at, text, says_disagreement=is_mismatch_error(failure))


def _by_exception(log: RankLog, exception: str, at: int) -> Fate:
    name = exception.split(":", 1)[0].strip()
    frame = user_frame(log.exception_stack)
    if name == "KeyboardInterrupt":
        return Fate("told", "killed", at, "was interrupted", frame)
    if name == "SystemExit":
        code = log.observation.exit_code
        status = str(code) if code is not None else exception.partition(":")[2].strip() or "1"
        return Fate("own", "exit", at, f"exited with status {status}", frame)
    if is_refusal(exception):
        return Fate("peer", "exception", at, "raised DistributedOperationException", frame, refused=True)
    peer = is_peer_error(exception) and (_in_torch(log) or is_peer_error(_last_failure(log)) or name.startswith("Dist"))
    says = is_mismatch_error(exception)
    return Fate("peer" if peer else "own", "exception", at, f"raised {_short(exception)}", frame, says_disagreement=says)


def _in_torch(log: RankLog) -> bool:
    """Whether the exception came out of a collective: only then "timeout" speaks of a peer and not of a file server."""
    if not log.exception_stack:
        return True
    return any("torch/distributed" in frame.file or "torch/autograd" in frame.file for frame in log.exception_stack)


def _by_signal(log: RankLog, at: int) -> Fate:
    signal = log.observation.signal or "a signal"
    if log.observation.oom_killed:
        return Fate("own", "out-of-memory", at, f"was killed by the kernel's OOM killer ({signal})")
    if signal in _TOLD:
        return Fate("told", "killed", at, f"was ended by {signal}")
    if signal != "SIGKILL" and log.exception is not None:
        return _by_exception(log, log.exception, at)
    if is_peer_error(_last_failure(log)) and signal == "SIGABRT":
        return Fate("peer", "killed", at, f"died of {signal} after {_short(_last_failure(log))}")
    return Fate("own", "killed", at, f"died of {signal}", says_disagreement=signal in ("SIGABRT", "SIGSEGV"))


def _last_failure(log: RankLog) -> str | None:
    """The error of the last collective that failed, if nothing completed after it."""
    for op in reversed(log.collectives):
        if op.state is State.FAILED:
            return op.error or "a failed collective"
        if op.state is State.COMPLETED:
            return None
    return None


def _short(text: str | None) -> str:
    first = (text or "").strip().splitlines()[0] if (text or "").strip() else "an error"
    # gloo begins with its own source file and ends with advice.
    first = re.sub(r"\[/\S+\.(cc|cpp|h):\d+\] ", "", first).split(". This is typically")[0]
    return first if len(first) <= 160 else first[:157] + "..."


def sort_out(fates: dict[int, Fate]) -> dict[int, Fate]:
    """Look at all ends together: who ended after others had failed was probably ended by them.

    Under torchrun the siblings of a failed rank get SIGTERM, and SIGKILL half a minute later.
    """
    own = [fate.at_ns for fate in fates.values() if fate.kind == "own" and fate.at_ns]
    first_failure = min((fate.at_ns for fate in fates.values() if fate.failed and fate.at_ns), default=0)
    gone = sorted(fate.at_ns for fate in fates.values() if fate.kind == "gone")
    sorted_out: dict[int, Fate] = {}
    for rank, fate in fates.items():
        if (fate.kind == "own" and fate.why == "killed" and "SIGKILL" in fate.text and fate.at_ns > first_failure + _LATE_KILL_NS) or (
            fate.kind == "gone" and (own or (len(gone) > 1 and fate.at_ns > gone[0] + 600_000_000))
        ):
            fate = msgspec.structs.replace(fate, kind="told")
        sorted_out[rank] = fate
    return sorted_out
