"""What ranks do outside of collectives, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from commlens.diagnosis.index.activity import Activity, Sign, SignKind
from commlens.diagnosis.words.exits import exit_words
from commlens.text import duration, frame_phrase, size, verb

_ONE = (0,)  # any rank: the verb is singular


def activity_words(doing: Activity, ranks: Sequence[int] = _ONE) -> str:
    """Return what ranks do: ``"has been in train.py:57 load_batch for 31 s"``.

    Args:
        doing: what all of them do.
        ranks: the subject of the verb.
    """
    where = frame_phrase(doing.frame)
    inside = f" in {where}" if where else ""
    since = f" for {duration(doing.for_ns)}" if doing.for_ns else ""
    is_, has = verb(ranks, "is", "are"), verb(ranks, "has", "have")
    match doing.state:
        case "runs":
            return _running(doing, ranks, inside, since)
        case "not-initialised":
            return f"{has} not called init_process_group yet"
        case "expected-slow":
            return f"{is_} in a block marked as slow ({doing.expecting})"
        case "uninterruptible":
            return f"{is_} in uninterruptible I/O{inside}{since}"
        case "throttled":
            its = verb(ranks, "its cgroup's quota", "their cgroups' quotas")
            return f"{is_} starved of CPU by {its}{inside}"
        case "holds-gil":
            return f"{verb(ranks, 'holds', 'hold')} the GIL{inside}{since}"
        case "stopped":
            return f"{is_} stopped (by SIGSTOP or a debugger)"
        case "debugged":
            return f"{is_} stopped by a debugger"
        case "shuts-down":
            return f"{has} finished and {is_} shutting down"
        case "finished":
            return f"{has} finished"
        case "ended":
            return exit_words(doing.exit, ranks) if doing.exit is not None else "ended"
        case "was-ended":
            return f"{verb(ranks, 'was', 'were')}{inside or ' elsewhere'}"


def _running(doing: Activity, ranks: Sequence[int], inside: str, since: str) -> str:
    is_ = verb(ranks, "is", "are")
    if doing.stack.why == "initialising":
        return f"{is_} still initialising{inside}{since}"
    been = verb(ranks, "has been", "have been") if since else is_
    if doing.stack.why == "compilation":
        return f"{been} compiling{inside}{since}"
    return f"{been}{inside or ' outside any collective'}{since}"


def sign_words(signs: Sequence[Sign]) -> list[str]:
    """``["its stack does not move", "it uses no CPU"]``."""
    return [_SIGNS[sign.kind](sign) for sign in signs]


def _used_cpu(sign: Sign) -> str:
    return f"it used {sign.amount:.1f} s of CPU in {sign.window_s:.0f} s"


_SIGNS: Mapping[SignKind, Callable[[Sign], str]] = {
    "announced-exit": lambda _: "its process announced its exit",
    "process-state": lambda sign: f"its process is in state {sign.about}",
    "others-have-not-run": lambda _: "its other threads have not run since",
    "quota-used": lambda sign: f"its CPU quota was used up {sign.amount:.0%} of the time",
    "exit": lambda sign: exit_words(sign.exit) if sign.exit is not None else "ended",
    "active-before": lambda sign: f"it was active {duration(sign.amount * 1e9)} before",
    "waited-for-memory": lambda sign: (
        f"its cgroup waited for memory {sign.amount:.0f} % of the time"
    ),
    "unsent-bytes": lambda sign: (
        f"its TCP connections hold {size(sign.amount)} that the other side does not take"
    ),
    "on-stack": lambda sign: f"{frame_phrase(sign.frame)} is on its stack",
    "in-init": lambda _: "it has not returned from init_process_group",
    "stack-moves": lambda _: "its stack moves",
    "stack-still": lambda _: "its stack does not move",
    "used-cpu": _used_cpu,
    "spins": lambda sign: f"{_used_cpu(sign)}, as a thread does that waits for a device",
    "waits-for-core": lambda _: "it waits for a core",
    "no-cpu": lambda _: "it uses no CPU",
    "waits-for": lambda sign: sign.about,
    "child-used-cpu": lambda sign: f"its child processes used {sign.amount:.1f} s of CPU",
    "child-waits-for-core": lambda _: "a child process waits for a core",
    "net-bytes": lambda sign: f"it sent or received {size(sign.amount)} in {sign.window_s:.0f} s",
    "io-bytes": lambda sign: f"it read or wrote {size(sign.amount)} in {sign.window_s:.0f} s",
}
