"""The ranks that others wait for because they have not come: how long they have stayed away, and
whether they wait for something outside of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from commlens.diagnosis.index.activity import quiet_ns
from commlens.model.cause import Missing, Why
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict

_HELD_FROM_OUTSIDE: Final[frozenset[Why]] = frozenset({"stopped", "uninterruptible-io"})


def late_ranks(verdict: Verdict, logs: Sequence[RankLog]) -> list[RankLog]:
    """Return the logs of the ranks that are to blame for not coming; none if the verdict blames
    no rank for that.
    """
    cause, by_rank = verdict.cause, {log.rank: log for log in logs}
    if not isinstance(cause, Missing) or cause.blames_waiting:
        return []
    return [by_rank[rank] for rank in verdict.culprits if rank in by_rank]


def stayed_ns(late: Sequence[RankLog]) -> int:
    """Return how long the first of the late ranks has been where it is; 0 if unknown."""
    return max((quiet_ns(log) for log in late), default=0)


def may_go_on(verdict: Verdict, logs: Sequence[RankLog]) -> bool:
    """Return whether the ranks to blame wait for something outside of the job, so that they may go
    on at any moment: they are stopped, they sleep, or they wait for a disk, a server, or a process
    that is no rank.

    Args:
        verdict: what a diagnosis found.
        logs: from which it was made.
    """
    if verdict.why in _HELD_FROM_OUTSIDE:
        return True
    late, ranks = late_ranks(verdict, logs), {(log.host, log.pid) for log in logs}
    return bool(late) and all(
        log.observation.waits_for and (log.host, log.observation.waits_for_pid) not in ranks
        for log in late
    )
