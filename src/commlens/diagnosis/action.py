"""Decide what to do with a job after a verdict: one table over causes.

A rank that died because its GPU fell off the bus: start the job again without that node. Ranks that
disagree on a collective: do not start it again unchanged, each attempt will meet that fault. At the
end of the module, verdicts on earlier attempts at the same job are compared: a fault that comes
back does not pass by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final, get_args

import msgspec

from commlens.diagnosis.index.process_exit import CRASHES
from commlens.matching.error_texts import (
    Failure,
    consequence_of,
    failure_of,
    is_memory_of_others,
)
from commlens.matching.errors import (
    ErrorKind,
    is_kernel_error,
    known_error,
    names_backend,
    worker_end,
)
from commlens.model.cause import (
    AnyCause,
    Cause,
    CollectiveRef,
    Confidence,
    Dead,
    Departure,
    Diverged,
    Ended,
    Hardware,
    HelpersAwaited,
    JobEnding,
    Missing,
    Motionless,
    OfHardware,
    Outcome,
    Refused,
    Slow,
    Straggler,
    StuckInside,
    ToldByErrors,
    ToldByLogs,
    Unexplained,
    Unrecorded,
    Unwritten,
    Working,
)
from commlens.model.health import HealthEvent, What
from commlens.model.verdict import Action, Because, Do, Finding, Verdict
from commlens.model.xids import xid
from commlens.text import signal_name

Decided = tuple[Do, Because, Confidence]
"""What to do, why, and how sure that is: a row of the tables."""

NOT_KNOWN: Final[Decided] = ("unknown", "not-known", "low")
_PROGRAM: Final[Decided] = ("stop", "program", "high")

_STANDING: Final[frozenset[What]] = frozenset(
    {
        "nvswitch-error",
        "gpu-gone",
        "ecc-uncorrected",
        "pcie-error",
        "pcie-width-fell",
        "memory-error",
        "machine-check",
        "link-down",
        "rate-fell",
        "adapter-error",
        "io-error",
        "gpu-throttled",
    }
)
"""Changes that stay until somebody repairs the node."""

_ERRORS: Final[Mapping[ErrorKind, Decided]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "shared-gpu",
                "no-interface",
                "shared-memory",
                "locked-memory",
                "gpu-direct",
                "peer-access",
                "versions",
            ),
            ("stop", "settings", "high"),
        ),
        **dict.fromkeys(("device-assert", "unused-parameters"), ("stop", "exception", "high")),
        "no-such-gpu": ("stop", "settings", "medium"),
        "port-taken": ("retry", "connection", "low"),  # often by the end of an earlier attempt
        "bad-kernel": ("stop", "exception", "medium"),
        "gpu-memory": ("stop", "memory", "medium"),
        **dict.fromkeys(
            ("store-lost", "store-unreachable", "rendezvous", "not-all-joined", "network-link"),
            ("retry", "connection", "medium"),
        ),
        **dict.fromkeys(
            ("old-driver", "fabric-manager", "nvls"), ("exclude-node", "settings", "medium")
        ),
    }
)
_FAILURES: Final[Mapping[Failure, Decided]] = MappingProxyType(
    {
        "memory": ("stop", "memory", "medium"),
        "refused": ("stop", "exception", "medium"),
        "broken-device": ("exclude-node", "hardware", "medium"),
        "no-device": ("exclude-node", "settings", "medium"),
        "busy-device": ("retry", "not-known", "low"),  # often by the end of an earlier attempt
        "connection": ("retry", "connection", "medium"),
        "device": NOT_KNOWN,
        "crashed": ("retry", "crashed", "low"),
        "interrupted": NOT_KNOWN,
    }
)
_ENDINGS: Final[Mapping[JobEnding | None, Decided]] = MappingProxyType(
    {
        "out-of-memory": ("stop", "memory", "medium"),
        "node-failure": ("exclude-node", "node-lost", "medium"),
        "preemption": ("retry", "preempted", "high"),
        "evicted": ("retry", "killed", "low"),
        "time-limit": ("retry", "time-limit", "high"),
        "gpu-error": ("exclude-node", "hardware", "medium"),
        "cancelled": ("stop", "cancelled", "medium"),
        "killed": ("retry", "killed", "low"),
        "store-unreachable": ("retry", "connection", "medium"),
        "store-awaited": ("wait", "connection", "low"),
    }
)


def action_of(
    verdict: Verdict,
    *,
    hosts: Mapping[int, str] = MappingProxyType({}),
) -> Action | None:
    """Return what to do with the job; None if nothing is wrong, or it goes on with slow ranks.

    Args:
        verdict: of the job.
        hosts: by rank as the verdict numbers them, as far as they are known.
    """
    first = _first_fault(verdict)
    if first is None:
        return Action(*NOT_KNOWN) if verdict.kind == "undetermined" and verdict.findings else None
    cause = first.cause
    if isinstance(cause, (Slow, Straggler)):
        return None
    broken = _broken(cause)
    told = _told_why(verdict, cause)
    decided = _told_by_logs(told) if told is not None else _decide(first, broken)
    _, because, confidence = decided
    nodes = _gone(cause) or sorted({each.node for each in broken}) or _hosts_of(verdict, hosts)
    # Whoever is to blame, a job is stopped or retried; but the node to leave out is a culprit's.
    sure = confidence if first.certain and not broken else _less_sure(confidence, first.confidence)
    return Action(
        _on_nodes(decided, nodes, {*hosts.values()}, by_logs=told is not None),
        because,
        sure,
        nodes,
        parts=sorted({each.event.part for each in broken}),
        since_ns=min((each.event.first_ns for each in broken), default=0),
        line=verdict.source,
        wait_s=cause.patience_s if isinstance(cause, Working) else None,
    )


def _on_nodes(decided: Decided, nodes: Sequence[str], hosts: Set[str], *, by_logs: bool) -> Do:
    """Return what to do, given the nodes that have the fault and those of the job."""
    do, because, _ = decided
    if because == "settings" and nodes and {*nodes} == hosts:
        return "stop"  # all nodes have them, or the only one
    if by_logs and do == "exclude-node" and len(nodes) > 1:
        return "unknown"  # the kernel's line does not say on which node
    return do


def _hosts_of(verdict: Verdict, hosts: Mapping[int, str]) -> list[str]:
    """Return the hosts of the culprits, as far as they are known."""
    return sorted({hosts[rank] for rank in verdict.culprits if rank in hosts})


def _less_sure(one: Confidence, other: Confidence) -> Confidence:
    from_high_to_low = get_args(Confidence)
    return max(one, other, key=from_high_to_low.index)


def _first_fault(verdict: Verdict) -> Finding | None:
    """Return the first root cause, which decides; if ranks wait for one that works, their wait."""
    faults = (each for each in verdict.findings if each.root_cause or verdict.kind == "waiting")
    return next(faults, None)


def _decide(finding: Finding, broken: Sequence[Hardware]) -> Decided:
    """Return the row of the table for a cause; the last row is that of faults of the program."""
    cause = finding.cause
    if broken:
        return _broken_part(broken)
    if _gone(cause):
        return "exclude-node", "node-lost", "medium"
    if cause is None:
        return _PROGRAM if finding.kind.startswith("mismatch") else NOT_KNOWN
    row = _ROWS.get(type(cause))
    return row(cause) if row is not None else _PROGRAM


def _told_why(verdict: Verdict, cause: AnyCause | None) -> ToldByLogs | None:
    """Return the line of a scheduler or the kernel that says why a rank died; None without one."""
    if not isinstance(cause, Dead):
        return None
    told = [each.cause for each in verdict.findings if isinstance(each.cause, ToldByLogs)]
    by_device = is_kernel_error(cause.error) or failure_of(cause.error) in (
        "device",
        "broken-device",
    )
    fitting = {"out-of-memory": cause.signal == "SIGKILL", "gpu-error": by_device}
    return next((each for each in told if fitting.get(each.ending or "")), None)


# --- nodes


def _gone(cause: AnyCause | None) -> list[str]:
    """Return the nodes that fell silent, or that the scheduler says have failed."""
    if isinstance(cause, ToldByLogs):
        return cause.nodes
    return sorted({node.host for node in cause.lost_nodes}) if cause is not None else []


def _broken(cause: AnyCause | None) -> list[Hardware]:
    """Return the parts that broke and explain the fault."""
    if not isinstance(cause, OfHardware):
        return []
    return [each for each in cause.hardware if each.explains and _stands(each.event)]


def _stands(event: HealthEvent) -> bool:
    if event.what == "xid":
        return xid(event.number).effect == "stops"
    return event.what == "nfs-silent" or (event.what in _STANDING and not event.over)


def _broken_part(broken: Sequence[Hardware]) -> Decided:
    if all(each.event.what == "nfs-silent" for each in broken):
        return "wait", "storage", "medium"
    return "exclude-node", "hardware", "high" if any(each.own for each in broken) else "medium"


# --- the rows of single causes


_DONE_WITH_IT: Final[tuple[Outcome, ...]] = (
    "finished",
    "extra-message",
    "extra-collective",
    "extra-line",
)


def _missing(cause: Missing) -> Decided:
    left_order = cause.blamed_by in ("routine", "midway", "rounds", "recomputation", "majority")
    finished = cause.outcome in _DONE_WITH_IT or {*cause.processes} == {"clean"}
    if cause.locked_out or left_order or finished:
        return "stop", "program", cause.confidence
    if cause.activity.why in ("uninterruptible-io", "checkpoint-io", "data-loading"):
        return "retry", "data", "low"
    return NOT_KNOWN


def _stuck_inside(cause: StuckInside) -> Decided:
    if cause.state == "moving":
        return "wait", "working", "low"
    if cause.state == "nobody-listens":
        return "stop", "settings", "medium"
    return NOT_KNOWN if cause.state in ("held-up", "may-be-running") else ("retry", "stuck", "low")


def _dead(cause: Dead) -> Decided:
    if cause.why == "out-of-memory":
        return "stop", "memory", "medium"
    if cause.why not in ("killed", "exit"):
        return _raised(cause.error, "medium" if cause.doubt else "high")
    signal = cause.signal or _signal_in(cause.status)
    if signal in CRASHES:
        # one that no rank waits for, and after which no other failed, may have done its work
        return ("retry", "crashed", "low") if cause.waits or cause.victims else NOT_KNOWN
    if cause.why == "exit" and not signal:
        return "stop", "exception", "medium"
    return "retry", "killed", "low"


def _signal_in(status: str) -> str:
    """Return the signal that ended a shell's child: the shell then exits with 128 and its number.
    Empty if the exit status is another, such as the 255 of ``sys.exit(-1)``.
    """
    number = int(status) - 128 if status.isdecimal() else 0
    return signal_name(number) if 0 < number <= _SIGNALS else ""


_SIGNALS: Final = 64  # of Linux


def _raised(text: str, confidence: Confidence) -> Decided:
    """Decide by the type and text of an exception of the program or of torch."""
    if worker_end(text):
        return "retry", "killed", "low"
    known = known_error(text)
    if known is not None and known.kind in _ERRORS:
        return _ERRORS[known.kind]
    failure = failure_of(text)
    if failure == "memory" and is_memory_of_others(text):
        return "retry", "memory", "low"
    if (
        failure in ("device", "interrupted", None)
        and names_backend(text)
        and consequence_of(text) is not None
    ):
        failure = "connection"
    if failure is not None:
        return _FAILURES[failure]
    return ("stop", "exception", confidence) if text else NOT_KNOWN


def _ended(cause: Ended) -> Decided:
    if cause.how == "kept-address":
        return ("retry", "stale-address", "medium") if cause.restarts else _PROGRAM
    if cause.how == "after-a-peer" and not cause.silent:
        known = known_error(cause.error)
        is_link = known is not None and known.kind == "network-link"
        return ("retry", "connection", "low") if is_link else NOT_KNOWN
    # Ctrl-C is no fault, but nothing tells why it was pressed
    was_cut = cause.how == "from-outside" and cause.signal != "SIGINT"
    return ("retry", "killed", "low") if was_cut else NOT_KNOWN


def _told_by_errors(cause: ToldByErrors) -> Decided:
    if cause.report == "checkpoint":
        return _raised(cause.error or "", "medium")
    return NOT_KNOWN if cause.report in ("barrier", "not-exchanged") else _PROGRAM


def _told_by_logs(cause: ToldByLogs) -> Decided:
    if cause.report == "raised":
        return _raised(cause.exception, "medium")
    if cause.report == "store-lost":
        return "retry", "connection", "medium"
    if cause.ending == "gpu-error" and not any(
        xid(number).effect == "stops" for number in cause.numbers
    ):
        return "stop", "exception", "medium"
    return _ENDINGS.get(cause.ending, NOT_KNOWN)


_BY_PROGRAMS: Final[tuple[Departure, ...]] = (
    "not-broadcast",
    "other-hyperparameters",
    "not-updated",
    "other-random-numbers",
    "other-order",
    "other-tensors",
    "same-data",
)
"""Differences that no hardware makes."""


def _diverged(cause: Diverged) -> Decided:
    if cause.departure == "one-bit":
        return "unknown", "hardware", "low"
    return ("stop", "program", "medium") if cause.departure in _BY_PROGRAMS else NOT_KNOWN


_ROWS: Final[Mapping[type[Cause], Callable[[Any], Decided]]] = MappingProxyType(
    {
        Missing: _missing,
        StuckInside: _stuck_inside,
        Dead: _dead,
        Ended: _ended,
        Refused: lambda cause: (
            NOT_KNOWN if cause.refused_for in ("ended", "not-arrived") else _PROGRAM
        ),
        ToldByErrors: _told_by_errors,
        ToldByLogs: _told_by_logs,
        Diverged: _diverged,
        Working: lambda cause: ("wait", "working", "high" if cause.expected else "medium"),
        **dict.fromkeys(
            (HelpersAwaited, Unrecorded, Unwritten, Motionless, Unexplained), lambda _: NOT_KNOWN
        ),
    }
)
"""The causes that are not always faults of the program. Mismatches, cycles, groups that differ and
the like are."""


# --- earlier attempts

SHORT_NS: Final = 3_600_000_000_000
"""Of attempts that lasted longer, only those are compared that ended at the same collective."""
_UNLUCKY: Final = 3
"""After so many short attempts in a row that were killed, crashed, lost a connection or found no
memory, at whatever line, the program counts as the reason.
"""
_MAY_BE_THE_PROGRAM: Final[frozenset[Because]] = frozenset(
    {"data", "connection", "stuck", "crashed", "killed", "memory", "stale-address", "not-known"}
)
"""Reasons that may pass by themselves: if the fault comes back at the same line, either the program
or the node is at fault."""


class Attempt(msgspec.Struct):
    """The part of a verdict on an earlier attempt that is compared. It can be read from verdicts of
    other versions, too.
    """

    kind: str
    source: str | None = None
    collective: CollectiveRef | None = None
    culprits: list[int] = []
    action: Action | None = None
    is_short: bool = False  # set by the reader: it lasted less than ``SHORT_NS``


def attempt_of(verdict: Verdict, *, is_short: bool) -> Attempt:
    """Return the part of a verdict that is compared with later attempts."""
    return Attempt(
        verdict.kind, verdict.source, verdict.collective, verdict.culprits, verdict.action, is_short
    )


def with_attempts(verdict: Verdict, before: Sequence[Attempt]) -> Action | None:
    """Return a verdict's action, with the number of attempts that ended with the same fault.

    A fault that comes back does not pass by itself. So if its reason does not say why it should
    come back, the program or the node counts as the reason, and the action is to change the program
    or to leave out the node. The same holds after ``_UNLUCKY`` short attempts in a row that were
    killed, crashed, lost a connection or found no memory.

    Args:
        verdict: with its action.
        before: earlier attempts at the same job, the last one first.
    """
    action = verdict.action
    if action is None:
        return None
    # Attempts between these may have failed because a restart of torch's met the former address.
    if action.because != "stale-address":
        before = [each for each in before if _reason(each) != "stale-address"]
    same = [*takewhile(partial(_is_same, action, verdict), before)]
    alike = [*takewhile(lambda each: each.is_short and _reason(each) == action.because, before)]
    may_be_luck = action.because in ("killed", "crashed", "connection", "memory")
    unlucky = may_be_luck and len(alike) >= _UNLUCKY - 1
    if not same and not unlucky:
        return action
    changed: dict[str, Any] = {"attempts": 1 + max(len(same), len(alike) if unlucky else 0)}
    if action.because in _MAY_BE_THE_PROGRAM and action.do != "stop":
        changed |= {"do": "stop", "confidence": "medium"}
        if node := _node_at_fault(action, verdict, same):
            changed |= {"do": "exclude-node", "nodes": [node]}
    return msgspec.structs.replace(action, **changed)


def _node_at_fault(action: Action, verdict: Verdict, same: Sequence[Attempt]) -> str | None:
    """Return the one node that is at fault now and in the same attempts; None if there is none, or
    if the same rank was at fault each time: on whatever node, the program is then at fault. In a
    job of several worlds the numbers of processes are the verdict's own, so they cannot be
    compared.
    """
    if verdict.worlds or all(each.culprits == verdict.culprits for each in same):
        return None
    nodes = [{*each.action.nodes} if each.action is not None else set() for each in same]
    at_fault = {*action.nodes}.intersection(*nodes)
    return at_fault.pop() if len(at_fault) == 1 else None


def _reason(attempt: Attempt) -> Because | None:
    return attempt.action.because if attempt.action is not None else None


def _is_same(action: Action, verdict: Verdict, attempt: Attempt) -> bool:
    """Return whether an earlier attempt ended with the same fault, whichever rank it hit: for the
    same reason, of the same kind, at the same line and in the same op, of which one may be unknown.
    An attempt that was not short did so only if it ended at the same number of that op, too.
    """
    now, then = verdict.collective, attempt.collective
    place = verdict.source, now and now.op
    if _reason(attempt) != action.because or place == (None, None):
        return False
    if (verdict.kind, *place) != (attempt.kind, attempt.source, then and then.op):
        return False
    return attempt.is_short or (now is not None and now.sequence_number > 0 and now == then)
