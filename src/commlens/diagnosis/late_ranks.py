"""The ranks that others wait for because they have not come: how long they have stayed away, and
whether they wait for something outside of the job.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from commlens.diagnosis.index.activity import quiet_ns
from commlens.model.cause import Missing, Why
from commlens.model.collective import FrameKind
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict

_HELD_FROM_OUTSIDE: Final[frozenset[Why]] = frozenset({"stopped", "uninterruptible-io"})
_PIPES_OF_PROCESSES: Final = "multiprocessing/connection.py"
"""On the stack while a process waits for those that it has started: a data loader's workers."""
_INNERMOST: Final = 3  # frames; below its own there are those of selectors.py


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
    return bool(late) and all(_waits_outside(log, ranks) for log in late)


def _waits_outside(log: RankLog, ranks: Set[tuple[str, int]]) -> bool:
    """Return whether a rank's main thread is seen to wait for something outside of the job.

    Args:
        log: of the rank.
        ranks: the hosts and pids of all ranks.
    """
    seen, stack = log.observation, log.main_stack
    if seen.holds_gil:
        return False  # its own other threads cannot run
    if seen.waits_for:
        return (log.host, seen.waits_for_pid) not in ranks
    # the kernel does not show a wait for several files at once
    frames = (
        [frame for frame in stack.frames if frame.kind is not FrameKind.NATIVE] if stack else []
    )
    return any(frame.file.endswith(_PIPES_OF_PROCESSES) for frame in frames[:_INNERMOST])
