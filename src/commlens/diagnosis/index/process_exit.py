"""How each process ended, and whether it failed by itself or because another one did.

First each process is classified by its own black box: rank 2 raised ValueError (``own``), rank 0
raised "Connection closed by peer" (``peer``), rank 1 died of SIGKILL (``own``, as far as it shows).
Then the processes are compared: rank 1 was killed 31 s after rank 2 had failed, as torchrun does,
so it was ``terminated``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import msgspec

from commlens.matching.error_texts import (
    Consequence,
    consequence_of,
    is_mismatch_error,
    is_peer_error,
    is_refusal,
)
from commlens.matching.errors import is_own_error, known_error, names_backend
from commlens.model.cause import ExitKind, Why
from commlens.model.collective import Collective, Frame, State, user_frame
from commlens.model.ranklog import LATE_KILL_NS, STOP_SIGNALS, End, RankLog
from commlens.text import signal_name

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
# after its abort hooks: torch's own writes a dump, in 15 s, or once more without stacks
_ABORTS_WITHIN_NS = 60_000_000_000
_TERMINATION_CODES = frozenset({143, 130, 129, -15, -2, -1})
_SAME_MOMENT_NS = 600_000_000
_OF_WRAPPERS = ("AssertionError", "RuntimeError", "TimeoutError")

# the place in torch's source, the advice to set NCCL_DEBUG, and NCCL's version
_NCCL_ERROR = re.compile(r"NCCL error in: (?:\S+:\d+, )?")
_NCCL_ADVICE = re.compile(
    r" \(run with [^)]*\)| - please report this issue to the NCCL developers|, NCCL version \S+"
)
_LAST_ERROR = re.compile(
    r"\n(?:(?:NCCL )?Last [Ee]rror:\s*|(?:\S+ )?NCCL WARN )(?P<error>\S[^\n]*)"
)


class ProcessExit(msgspec.Struct):
    """How a process ended, or that it has not."""

    kind: ExitKind
    why: Why = "unknown"
    at_ns: int = 0  # Unix ns; 0: unknown
    how: How = "runs"
    source: Frame | None = None  # the user's line that raised
    status: str = ""  # with which it exited; sys.exit takes any text
    # that it raised, or after which it ended: the first line of torch's or the program's text
    error: str = ""
    suggests_mismatch: bool = False  # the error is one that mismatched collectives cause
    refused: bool = False  # strict verification refused one of its collectives
    unspecific: bool = False  # its error does not tell whether another rank caused it
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
    seen, exception = log.observation, log.exception or None
    end = seen.end
    at = seen.ended_ns or (log.heartbeat_ns if end is not End.RUNNING else 0)
    if exception is None and not log.closed and not seen.has_ended:
        return ProcessExit("alive")
    if exception is None and end is End.RUNNING:
        return ProcessExit("leaving", "finished", how="shuts-down")
    if end is End.CLEAN or (exception is None and end is End.UNKNOWN):
        return ProcessExit("clean", "finished", at, "finished")
    if end is End.KILLED:
        return _from_signal(log, at, gave_up=gave_up)
    if exception is not None:
        return _from_exception(log, exception, at)
    return _from_absence(log, at) if end is End.GONE else _from_exit_code(log, at)


def _from_absence(log: RankLog, at: int) -> ProcessExit:
    failure = _last_failure(log)
    if is_peer_error(failure):
        return ProcessExit("peer", "exception", at, "ended", error=_shortened_error(failure))
    if log.closed or log.left:
        return ProcessExit("clean", "finished", at, "finished")
    return ProcessExit("gone", "unknown", at, "is-gone")


def _from_exit_code(log: RankLog, at: int) -> ProcessExit:
    code, failure = log.observation.exit_code, _last_failure(log)
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
        return ended("peer", "exception", error=_shortened_error(failure))
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
        code, failure = log.observation.exit_code, _last_failure(log)
        status = str(code) if code is not None else exception.partition(":")[2].strip() or "1"
        # torch.multiprocessing.spawn turns the exception of a child into its exit
        if is_peer_error(failure):
            error = _shortened_error(failure)
            return ended("peer", "exception", how="exited", status=status, error=error)
        return ended("own", "exit", how="exited", status=status)
    if is_refusal(exception) or log.refusal is not None:
        return ended("peer", "exception", how="raised", refused=True)
    of_torch = name.startswith("Dist") or _is_of_torch(log, exception)
    follows = _consequence_of(log, exception)
    unspecific = follows == "unspecific" and of_torch
    from_peer = follows is not None and not unspecific
    return ended(
        "peer" if _follows_peer(log, name, may=from_peer, of_torch=of_torch) else "own",
        "exception",
        how="raised",
        error=_shortened_error(log.told_error),
        suggests_mismatch=is_mismatch_error(exception),
        unspecific=unspecific or (not of_torch and _lacks_group(log)),
    )


def _lacks_group(log: RankLog) -> bool:
    """Return whether the last group was not made: a program may go on without it, and fail later,
    if a peer has ended meanwhile.
    """
    return any(op.state is State.FAILED for op in log.setups[-1:])


def _follows_peer(log: RankLog, name: str, *, may: bool, of_torch: bool) -> bool:
    """Return whether an exception follows from another rank's fault. Either its text may say so,
    and torch raised it or a collective failed because of a peer. Or such a collective failed in the
    same step, and a wrapper like torchft's hid that and raised an error of its own.
    """
    failed = _last_failed(log)
    if failed is None or not is_peer_error(failed.error):
        return may and of_torch
    of_wrapper = name in _OF_WRAPPERS and known_error(log.told_error) is None
    return may or (of_wrapper and failed.step == log.steps)


def _consequence_of(log: RankLog, exception: str) -> Consequence | None:
    """Return how an exception may follow from another rank's fault, by its own text or else by what
    NCCL printed before it. A TypeError never does: a call was given a wrong argument.
    """
    is_own = is_own_error(log.told_error) or exception.startswith("TypeError")
    follows = None if is_own else consequence_of(exception)
    if follows == "unspecific" and log.warnings:
        return consequence_of("\n".join(log.warnings)) or follows
    return follows


def _is_of_torch(log: RankLog, exception: str) -> bool:
    """Return whether torch raised the exception, as far as its stack and text tell. In the text of
    other code, "timeout" may mean, say, a file server, and not a peer.
    """
    if not log.exception_stack or names_backend(exception):
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
    if log.exception and (signal != "SIGKILL" or not log.closed):
        return _from_exception(log, log.exception, at)  # its launcher, or Ray, ended it afterwards
    if signal in STOP_SIGNALS:
        kind: ExitKind = "own" if log.observation.ended_alone else "terminated"
        return ended(kind, "killed", how="ended-by-signal")
    if signal == "SIGABRT" and (gave_up or _waited_out(log, at)):
        return ended("peer", "killed", how="aborted-by-watchdog")
    if is_peer_error(failure) and signal == "SIGABRT":
        return ended("peer", "killed", how="died", error=_shortened_error(failure))
    if log.closed and signal in CRASHES:
        return ended("own", "killed", how="died", was_exiting=True)
    mismatch = signal in ("SIGABRT", "SIGSEGV")
    return ended("own", "killed", how="died", suggests_mismatch=mismatch)


def _waited_out(log: RankLog, until_ns: int) -> bool:
    """Return whether torch's watchdog aborted the process: its abort hook told so just before, or
    the rank's device had waited for almost the group's timeout, for the oldest collective in
    flight, or for the last one if nothing tells whether that completed.
    """
    if log.gave_up_ns and until_ns - log.gave_up_ns <= _ABORTS_WITHIN_NS:
        return True
    ahead = [op for op in log.collectives if op.channel.runs_ahead]
    awaited = [op for op in ahead if op.in_flight] or [
        op for op in ahead[-1:] if op.state is State.UNKNOWN
    ]
    if not awaited or not log.timeout_s:
        return False
    return until_ns - awaited[0].announced_ns >= 0.9e9 * log.timeout_s


def _last_failure(log: RankLog) -> str | None:
    """Return the error of the last failed collective, unless a later one completed; empty if
    its text is unknown.
    """
    failed = _last_failed(log)
    return None if failed is None else failed.error or ""


def _last_failed(log: RankLog) -> Collective | None:
    ended = (op for op in reversed(log.collectives) if op.state in (State.FAILED, State.COMPLETED))
    last = next(ended, None)
    return last if last is not None and last.state is State.FAILED else None


def _shortened_error(text: str | None) -> str:
    """Return the first line of an error, without gloo's own source file at its beginning and gloo's
    advice at its end; of NCCL's error, also the last error, which says what happened.
    """
    first = ((text or "").strip().splitlines() or ["an error"])[0]
    if "CCL" in first:
        first = _NCCL_ADVICE.sub("", _NCCL_ERROR.sub("NCCL error: ", first)).rstrip()
        if told := _LAST_ERROR.search(text or ""):
            first += ": " + told["error"]
    first = re.sub(r"\[/\S+\.(cc|cpp|h):\d+\] ", "", first).split(". This is typically")[0]
    first = first.removesuffix(".") if not first.endswith("..") else first
    return first if len(first) <= 160 else first[:157] + "..."


# --- processes compared


def attribute_exits(
    exits: dict[int, ProcessExit], logs: Mapping[int, RankLog] = MappingProxyType({})
) -> dict[int, ProcessExit]:
    """Reclassify as ``terminated`` the processes that were probably ended because another one had
    failed, and as ``peer`` those whose error tells no cause where another one's does.

    Args:
        exits: by rank.
        logs: by rank, if there are logs.
    """
    if len(exits) > 1 and _are_all_killed(exits, logs):
        terminated = set(exits)
    else:
        terminated = {*_killed_afterwards(exits, logs), *_gone_afterwards(exits)}
    has_cause = any(one.kind == "own" and not one.unspecific for one in exits.values())

    def kind_of(rank: int, one: ProcessExit) -> ExitKind:
        if rank in terminated:
            return "terminated"
        return "peer" if has_cause and one.unspecific else one.kind

    return {
        rank: msgspec.structs.replace(one, kind=kind_of(rank, one)) for rank, one in exits.items()
    }


def _is_killed(one: ProcessExit) -> bool:
    return one.kind == "own" and one.why == "killed" and one.signal == "SIGKILL"


def _are_all_killed(exits: Mapping[int, ProcessExit], logs: Mapping[int, RankLog]) -> bool:
    """Return whether a launcher or a scheduler has killed all processes. Schedulers kill them at
    once. torchrun kills those that Ctrl-C does not end half a minute later, one after the other,
    and waits for the end of each, which takes seconds with a device. If one had failed by itself,
    torchrun would first have sent SIGTERM to the others, and half a minute later SIGKILL.
    """
    if not all(map(_is_killed, exits.values())):
        return False
    moments = sorted(one.at_ns for one in exits.values())
    if logs and all(log.launcher == "torchrun" for log in logs.values()):
        return max(after - before for before, after in pairwise(moments)) < LATE_KILL_NS
    return moments[-1] - moments[0] < _SAME_MOMENT_NS


def _killed_afterwards(exits: Mapping[int, ProcessExit], logs: Mapping[int, RankLog]) -> list[int]:
    """Return the ranks that were killed because another one had failed, or Ctrl-C was pressed.

    Under torchrun the siblings of a failed rank get SIGTERM, and SIGKILL half a minute later. Ray
    and schedulers kill them at once: then they waited for a rank that raised an exception.
    """
    since_ns = _kills_since_ns(exits)
    raised = [
        logs[rank]
        for rank, one in exits.items()
        if rank in logs and (one.kind, one.why) == ("own", "exception")
    ]
    return [
        rank
        for rank, one in exits.items()
        if _is_killed(one)
        and (
            one.at_ns > since_ns
            or (rank in logs and any(_waited_for(logs[rank], other) for other in raised))
        )
    ]


def _kills_since_ns(exits: Mapping[int, ProcessExit]) -> int:
    """Return since when a launcher may kill processes: after a failure, or after Ctrl-C."""
    failures = [one.at_ns for one in exits.values() if one.failed and one.at_ns]
    late_ns = min(failures, default=0) + LATE_KILL_NS
    interrupts = [one.at_ns for one in exits.values() if one.how == "interrupted"]
    return min(late_ns, min(interrupts) - _SAME_MOMENT_NS) if interrupts else late_ns


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


def _gone_afterwards(exits: Mapping[int, ProcessExit]) -> list[int]:
    """Return the ranks whose end nobody saw, and that ended after another one: one that failed by
    itself, or the first of them.
    """
    gone = {rank: one.at_ns for rank, one in exits.items() if one.kind == "gone"}
    if any(one.kind == "own" and one.at_ns for one in exits.values()):
        return [*gone]
    first_ns = min(gone.values(), default=0)
    return [rank for rank, at_ns in gone.items() if at_ns > first_ns + _SAME_MOMENT_NS]
