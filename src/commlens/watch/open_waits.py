"""The calls in which ranks wait: those of this node as the headers of their black boxes show them,
those of other nodes as their beats do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from commlens.blackbox.reader import BoxStatus
from commlens.model.ranklog import RankLog
from commlens.watch.roster import Member

TIMEOUT_LEAD_MAX_S: Final = 15.0
TIMEOUT_LEAD_MIN_S: Final = 2.0


def timeout_lead_s(timeout_s: float) -> float:
    """Return how long before a process group's timeout the dump is made: 10% of it, at most 15 s,
    at least 2 s, but never more than a quarter of a timeout below 8 s.
    """
    return min(TIMEOUT_LEAD_MAX_S, max(0.1 * timeout_s, min(TIMEOUT_LEAD_MIN_S, 0.25 * timeout_s)))


class OpenWait(NamedTuple):
    """The call in which a rank waits: its oldest collective in flight, an ``init`` that makes a
    group, or a call that only the ``stack`` of the main thread shows.
    """

    since_ns: int  # CLOCK_MONOTONIC
    pid: int  # below 0: of another node
    kind: Literal["collective", "init", "stack"]
    number: int = 0  # of a collective: its index
    timeout_s: float = 0.0  # of its process group; 0: unknown
    expires_ns: int = 0  # when that expires, CLOCK_MONOTONIC; 0: unknown
    limit_s: float = 0.0  # set by StallLimit: a longer wait is looked at; 0: nothing is learned


def _collective_wait(pid: int, status: BoxStatus, usual_s: float) -> OpenWait:
    """Return the wait in a collective; ``usual_s``: the timeout of most process groups."""
    # that of its group may be shorter
    own_s = status.timeout_s if 1.0 <= status.timeout_s < usual_s else usual_s
    expires_ns = status.expires_mono_ns
    if own_s and not expires_ns:
        expires_ns = status.oldest_mono_ns + int(own_s * 1e9)
    return OpenWait(
        status.oldest_mono_ns, pid, "collective", status.oldest_index, own_s, expires_ns
    )


def waits(members: Sequence[Member]) -> list[OpenWait]:
    """Return the call in which each living rank waits, or seems to wait."""
    found: list[OpenWait] = []
    timeouts = sorted(member.status.timeout_s for member in members if member.status is not None)
    usual_s = timeouts[len(timeouts) // 2] if timeouts else 0.0  # one may be damaged
    for member in members:
        status = member.status
        if status is None or not member.alive or status.closed or status.left:
            continue
        if status.oldest_index and status.oldest_mono_ns:
            found.append(_collective_wait(member.pid, status, usual_s))
        elif status.blocked_since_mono_ns:
            found.append(OpenWait(status.blocked_since_mono_ns, member.pid, "init"))
        elif status.main_stack_since_mono_ns:
            # Perhaps in new_group, a store's wait or destroy_process_group: the diagnosis
            # recognises them by the stack.
            found.append(OpenWait(status.main_stack_since_mono_ns, member.pid, "stack"))
    return found


def waits_recorded(logs: Sequence[RankLog], timeout_s: float) -> bool:
    """Return whether records agree that an operation has been in flight for nearly a timeout: a
    single word may be damaged.
    """
    least_ns = (timeout_s - timeout_lead_s(timeout_s) - 1) * 1e9
    return any(
        op.in_flight and log.captured_ns - op.announced_ns >= least_ns
        for log in logs
        for op in log.collectives
    )
