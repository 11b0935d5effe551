"""The ranks that others wait for because they have not come, and whether they have stayed away."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.index.activity import quiet_ns
from commlens.model.cause import Missing
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict


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
