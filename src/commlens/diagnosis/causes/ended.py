"""Processes that failed, where nothing else tells why."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.causes.context import Context, processes_of
from commlens.model.cause import Ended


@dataclass
class FoundEnded:
    """Processes that failed, and the evidence."""

    cause: Ended
    first: int  # the rank to tell of
    failed: list[int]  # ranks that failed
    silent: list[int]  # ranks of which no line in the logs tells anything


def find_ended(context: Context) -> None:
    """Find processes that failed without a known cause."""
    views = context.job.views
    failed = sorted(
        rank for rank, view in views.items() if view.exit.failed and view.exit.kind != "gone"
    )
    if not failed or any(case.claim.kind == "dead" for case in context.cases):
        return
    peers = [rank for rank in failed if views[rank].exit.kind == "peer"]
    stopped = [rank for rank in failed if views[rank].exit.kind == "terminated"]
    if peers:
        _add_after_a_peer(context, peers, failed)
    elif stopped:
        _add_stopped(context, stopped)


def _add_after_a_peer(context: Context, peers: list[int], failed: list[int]) -> None:
    views = context.job.views
    first = min(peers, key=lambda rank: (views[rank].exit.at_ns or 1 << 62, rank))
    silent = _silent_ranks(context) if context.job.only_logs else []
    suspects = silent if len(silent) == 1 else []
    cause = Ended(
        kind="dead",
        why="exception",
        root_cause=True,
        culprits=suspects,
        blamed_by="absence" if suspects else "unknown",
        victims=failed,
        confidence="low",
        ranks=peers,
        processes=processes_of(context, peers),
        how="after-a-peer",
    )
    found = FoundEnded(cause, first, failed, silent)
    context.add(found, views[first].last_op, views[first].exit.source)


def _silent_ranks(context: Context) -> list[int]:
    """Return the ranks of which no line tells anything."""
    told = context.job.views.values()
    without = [
        view.rank for view in told if view.columns is not None and view.columns.dump.tells_nothing
    ]
    return sorted([*context.job.no_record, *without])


def _add_stopped(context: Context, stopped: list[int]) -> None:
    """Add ranks that were ended from outside: if one is gone, torchrun ends the others."""
    views = context.job.views
    gone = sorted(rank for rank, view in views.items() if view.exit.kind == "gone")
    ranks = gone or stopped
    cause = Ended(
        kind="dead",
        why="unknown" if gone else "killed",
        root_cause=True,
        culprits=gone if len(gone) == 1 else [],
        blamed_by="exit" if len(gone) == 1 else "undecided" if gone else "nobody",
        victims=stopped,
        confidence="medium",
        ranks=ranks,
        processes=processes_of(context, ranks),
        how="unobserved" if gone else "from-outside",
        signal=views[stopped[0]].log.observation.signal,
    )
    context.add(FoundEnded(cause, ranks[0], stopped, []), views[ranks[0]].last_op, None)
