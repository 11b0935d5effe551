"""How each process ended, and whether it failed by itself or because another one did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

import msgspec

from commlens.matching.error_claims import names_backend
from commlens.matching.error_texts import is_mismatch_error, is_peer_error, is_refusal
from commlens.matching.known_errors import is_own_error
from commlens.model.cause import Why
from commlens.model.collective import Frame, State, user_frame
from commlens.model.ranklog import End, RankLog
from commlens.text import signal_name

Kind = Literal["alive", "leaving", "clean", "own", "peer", "terminated", "gone"]
"""``own``: the process failed by itself. ``peer``: it failed because a peer ended or a wait timed
out. ``terminated``: the launcher or a user stopped it. ``gone``: it ended, and how is unknown.
``leaving``: it said goodbye but still exists, so its exit status is unknown.
"""

How = Literal[
    "runs",
    "shuts-down",
    "finished",
    "is-gone",
    "ended",
    "exited",
    "failed",
    "raised",
    "interrupted",
    "perhaps-interrupted",
    "out-of-memory",
    "ended-by-signal",
    "aborted-by-watchdog",
    "died",
]
"""How a process ended.

``is-gone``: nobody saw it. ``ended``: nobody saw how, but its last collective had failed.
``exited``: with a status that is not 0. ``failed``: with an unknown one. ``interrupted``: by
Ctrl-C. ``perhaps-interrupted``: by it alone, or its program raised KeyboardInterrupt.
``ended-by-signal``: by one that launchers and schedulers send. ``aborted-by-watchdog``: NCCL's,
because a collective took longer than its timeout. ``died``: of any other signal.
"""

CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
"""Signals by which a process ends because of an error in it."""
_TERMINATION_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
_TERMINATION_CODES = frozenset({143, 130, 129, -15, -2, -1})
_LATE_KILL_NS = 5_000_000_000
_SAME_MOMENT_NS = 600_000_000

# with the place in torch's source and the advice to set NCCL_DEBUG
_NCCL_ERROR = re.compile(
    r"NCCL error(?: in)?: (?:\S+:\d+, )?(?P<error>.*?)(?: \(run with [^)]*\)"
    r"| - please report this issue to the NCCL developers)?, NCCL version \S+"
)


class ProcessExit(msgspec.Struct):
    """How a process ended, or that it has not."""

    kind: Kind
    why: Why = "unknown"
    at_ns: int = 0  # Unix ns; 0: unknown
    how: How = "runs"
    source: Frame | None = None  # the user's line that raised
    status: str = ""  # with which it exited; sys.exit takes any text
    # that it raised, or after which it ended: the first line of torch's or the program's text
    error: str = ""
    suggests_mismatch: bool = False  # the error is one that mismatched collectives cause
    refused: bool = False  # strict verification refused one of its collectives
    signal: str = ""  # that ended it: "SIGKILL"
    was_exiting: bool = False  # it had destroyed its last process group, or its exit had begun

    @property
    def gave_up(self) -> bool:
        """Whether NCCL's watchdog aborted it: a collective took longer than its timeout."""
        return self.how == "aborted-by-watchdog"

    @property
    def ended(self) -> bool:
        """Whether the process has ended, well or badly."""
        return self.kind not in ("alive", "leaving")

    @property
    def failed(self) -> bool:
        """Whether the process ended badly."""
        return self.kind not in ("alive", "leaving", "clean")


def process_exit_of(log: RankLog, *, gave_up: bool = False) -> ProcessExit:
    """Classify one rank's exit from its black box and from what was observed of its process.

    Args:
        log: the black box.
        gave_up: whether a watchdog of torch had a reason to abort the process: a collective that
            did not complete in time.
    """
    seen = log.observation
    end = seen.end
    at = seen.ended_ns or (log.heartbeat_ns if end is not End.RUNNING else 0)
    exception = log.exception
    if exception is None and not log.closed and not seen.has_ended:
        return ProcessExit("alive")
    if exception is None and end is End.RUNNING:
        return ProcessExit("leaving", "finished", how="shuts-down")
    if end is End.CLEAN or (exception is None and end is End.UNKNOWN):
        return ProcessExit("clean", "finished", at, "finished")
    if exception is not None and end is not End.KILLED:
        return _from_exception(log, exception, at)
    if end is End.KILLED:
        return _from_signal(log, at, gave_up=gave_up)
    failure = _last_failure(log)
    if end is End.GONE:
        if is_peer_error(failure):
            return ProcessExit("peer", "exception", at, "ended", error=_short(failure))
        if log.closed or log.left:
            return ProcessExit("clean", "finished", at, "finished")
        return ProcessExit("gone", "unknown", at, "is-gone")
    return _from_exit_code(log, failure, at)


def _from_exit_code(log: RankLog, failure: str | None, at: int) -> ProcessExit:
    code = log.observation.exit_code
    ended = partial(
        ProcessExit,
        at_ns=at,
        how="failed" if code is None else "exited",
        status="" if code is None else str(code),
        signal=signal_name(-code) if code is not None and code < 0 else "",
    )
    if is_refusal(failure):
        return ended("peer", "exception", refused=True)
    if code in _TERMINATION_CODES:
        return ended("own" if log.observation.ended_alone else "terminated", "killed")
    if is_peer_error(failure):
        return ended("peer", "exception", error=_short(failure))
    if log.left and failure is None:
        # Ray ends the workers of a job that succeeded with status 1, without their exit handlers.
        return ended("clean", "finished", was_exiting=True)
    return ended("own", "exit", suggests_mismatch=is_mismatch_error(failure))


def _from_exception(log: RankLog, exception: str, at: int) -> ProcessExit:
    name = exception.split(":", 1)[0].strip()
    ended = partial(ProcessExit, at_ns=at, source=user_frame(log.exception_stack))
    if name == "KeyboardInterrupt":
        if log.observation.ended_alone:
            return ended("own", "killed", how="perhaps-interrupted")
        return ended("terminated", "killed", how="interrupted")
    if name == "SystemExit":
        code = log.observation.exit_code
        status = str(code) if code is not None else exception.partition(":")[2].strip() or "1"
        failure = _last_failure(log)
        # torch.multiprocessing.spawn turns the exception of a child into its exit
        if is_peer_error(failure):
            error = _short(failure)
            return ended("peer", "exception", how="exited", status=status, error=error)
        return ended("own", "exit", how="exited", status=status)
    if is_refusal(exception) or log.refusal is not None:
        return ended("peer", "exception", how="raised", refused=True)
    of_torch = _in_torch(log) or names_backend(exception) or name.startswith("Dist")
    from_peer = is_peer_error(exception) and not is_own_error(exception)
    peer = from_peer and (of_torch or is_peer_error(_last_failure(log)))
    return ended(
        "peer" if peer else "own",
        "exception",
        how="raised",
        error=_short(exception),
        suggests_mismatch=is_mismatch_error(exception),
    )


def _in_torch(log: RankLog) -> bool:
    """Whether torch raised the exception. Only then does "timeout" mean a peer, and not, say, a
    file server.
    """
    if not log.exception_stack:
        return True
    return any(
        "torch/distributed" in frame.file or "torch/autograd" in frame.file
        for frame in log.exception_stack
    )


def _from_signal(log: RankLog, at: int, *, gave_up: bool) -> ProcessExit:
    signal, failure = log.observation.signal or "", _last_failure(log)
    ended = partial(ProcessExit, at_ns=at, signal=signal)
    if log.observation.oom_killed:
        return ended("own", "out-of-memory", how="out-of-memory")
    if log.exception is not None and (signal != "SIGKILL" or not log.closed):
        return _from_exception(log, log.exception, at)  # its launcher, or Ray, ended it afterwards
    if signal in _TERMINATION_SIGNALS:
        kind: Kind = "own" if log.observation.ended_alone else "terminated"
        return ended(kind, "killed", how="ended-by-signal")
    waited_out = log.timeout_s > 0 and _waited_on_device_ns(log, at) >= 0.9e9 * log.timeout_s
    if signal == "SIGABRT" and (gave_up or waited_out):
        return ended("peer", "killed", how="aborted-by-watchdog")
    if is_peer_error(failure) and signal == "SIGABRT":
        return ended("peer", "killed", how="died", error=_short(failure))
    if log.closed and signal in CRASHES:
        return ended("own", "killed", how="died", was_exiting=True)
    mismatch = signal in ("SIGABRT", "SIGSEGV")
    return ended("own", "killed", how="died", suggests_mismatch=mismatch)


def _waited_on_device_ns(log: RankLog, until_ns: int) -> int:
    """Return how long ago the call was for whose op the rank's device waits: torch's watchdog
    aborts the process at the group's timeout.

    If the states of the newest collectives are unknown, none was issued since the last.
    """
    ahead = [op for op in log.collectives if op.channel.runs_ahead]
    in_flight = next((op for op in ahead if op.in_flight), None)
    if in_flight is not None:
        return until_ns - in_flight.announced_ns
    return until_ns - ahead[-1].announced_ns if ahead and ahead[-1].state is State.UNKNOWN else 0


def _last_failure(log: RankLog) -> str | None:
    """Return the error of the last failed collective, unless a later one completed; empty if
    its text is unknown.
    """
    for op in reversed(log.collectives):
        if op.state is State.FAILED:
            return op.error or ""
        if op.state is State.COMPLETED:
            return None
    return None


def _short(text: str | None) -> str:
    """Return the first line of an error, without gloo's own source file at its beginning and gloo's
    advice at its end; of NCCL's error, also the last error, which says what happened.
    """
    first, *rest = (text or "").strip().splitlines() or ["an error"]
    if found := _NCCL_ERROR.search(first):
        after = rest.index("Last error:") + 1 if "Last error:" in rest else len(rest)
        told = ": ".join(["NCCL error", found["error"], *rest[after : after + 1]])
        first = first[: found.start()] + told
    first = re.sub(r"\[/\S+\.(cc|cpp|h):\d+\] ", "", first).split(". This is typically")[0]
    first = first.removesuffix(".") if not first.endswith("..") else first
    return first if len(first) <= 160 else first[:157] + "..."


def _is_killed(one: ProcessExit) -> bool:
    return one.kind == "own" and one.why == "killed" and one.signal == "SIGKILL"


def _waited_for(log: RankLog, other: RankLog) -> bool:
    """Return whether a rank's last collective is in flight, and another rank of its group never
    issued it.
    """
    last = log.collectives[-1] if log.collectives else None
    if (
        last is None
        or not last.in_flight
        or last.is_point_to_point
        or other.rank not in last.channel.group.ranks
    ):
        return False
    return not any(
        op.channel.key == last.channel.key and op.sequence_number >= last.sequence_number
        for op in other.collectives
    )


def attribute_exits(
    exits: dict[int, ProcessExit], logs: Mapping[int, RankLog] = MappingProxyType({})
) -> dict[int, ProcessExit]:
    """Reclassify as ``terminated`` the processes that were probably ended because another one had
    failed.

    Under torchrun the siblings of a failed rank get SIGTERM, and SIGKILL half a minute later. Ray
    and schedulers kill them at once.

    Args:
        exits: by rank.
        logs: by rank, if there are logs.
    """
    failed_by_itself = any(one.kind == "own" and one.at_ns for one in exits.values())
    first_failure = min(
        (one.at_ns for one in exits.values() if one.failed and one.at_ns), default=0
    )
    gone = sorted(one.at_ns for one in exits.values() if one.kind == "gone")
    killed = [one.at_ns for one in exits.values() if _is_killed(one)]
    interrupted = [one.at_ns for one in exits.values() if one.how == "interrupted"]
    # A launcher kills at last those that Ctrl-C does not end, and schedulers kill all at once.
    all_killed = len(killed) == len(exits) > 1 and max(killed) - min(killed) < _SAME_MOMENT_NS

    raised = [
        logs[rank]
        for rank, one in exits.items()
        if rank in logs and one.kind == "own" and one.why == "exception"
    ]

    def was_terminated(rank: int, one: ProcessExit) -> bool:
        if _is_killed(one):
            if rank in logs and any(_waited_for(logs[rank], other) for other in raised):
                return True
            stopped = bool(interrupted) and one.at_ns > min(interrupted) - _SAME_MOMENT_NS
            return all_killed or stopped or one.at_ns > first_failure + _LATE_KILL_NS
        return one.kind == "gone" and (
            failed_by_itself or (len(gone) > 1 and one.at_ns > gone[0] + _SAME_MOMENT_NS)
        )

    return {
        rank: msgspec.structs.replace(one, kind="terminated") if was_terminated(rank, one) else one
        for rank, one in exits.items()
    }
