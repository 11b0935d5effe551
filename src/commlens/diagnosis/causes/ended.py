"""Processes that failed, where nothing else tells why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from commlens.diagnosis.causes.context import Context, processes_of
from commlens.diagnosis.index.job_index import RankView
from commlens.matching.error_texts import ended_in_refusal
from commlens.model.cause import Ended, Kind

_OPERATION = " Operation: "  # in the text of a refusal


@dataclass
class FoundEnded:
    """Processes that failed, and the evidence."""

    cause: Ended
    first: int  # the rank to tell of
    failed: list[int]  # ranks that failed
    silent: list[int]  # ranks without a line in the logs
    reason: str = ""  # of a refusal
    operation: str = ""  # that was refused


def find_ended(context: Context) -> None:
    """Find processes that failed without a known cause."""
    views = context.job.views
    failed = sorted(
        rank for rank, view in views.items() if view.exit.failed and view.exit.kind != "gone"
    )
    if not failed or any(case.claim.kind == "dead" for case in context.cases):
        return
    peers = [rank for rank in failed if views[rank].exit.kind == "peer"]
    refused = [rank for rank in peers if _has_refused_operation(views[rank])]
    stopped = [rank for rank in failed if views[rank].exit.kind == "terminated"]
    if refused:
        _add_refused(context, refused)
    elif peers:
        _add_after_a_peer(context, peers, failed)
    elif stopped:
        _add_stopped(context, stopped)


def _has_refused_operation(view: RankView) -> bool:
    return view.exit.refused and _OPERATION in (view.log.exception or "")


def _add_after_a_peer(context: Context, peers: list[int], failed: list[int]) -> None:
    views = context.job.views
    first = min(peers, key=lambda rank: (views[rank].exit.at_ns or 1 << 62, rank))
    silent = context.job.no_record if context.job.only_logs else []
    suspects = list(silent) if len(silent) == 1 else []
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
    found = FoundEnded(cause, first, failed, list(silent))
    context.add(found, views[first].last_op, views[first].exit.source)


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


def _add_refused(context: Context, ranks: list[int]) -> None:
    """Add a refusal that no record explains: of a call of a user's function, or of a rank that
    ended and is not seen.
    """
    views = context.job.views
    named = {ended: rank for rank in ranks for ended in ended_in_refusal(views[rank].log.exception)}
    if first := sorted(set(named) - set(ranks)):
        found = _named_by_refusal(context, first, named[first[0]], ranks)
    else:
        found = _refused_call(context, ranks)
    context.add(found, None, views[ranks[0]].exit.source)


def _refused_call(context: Context, ranks: list[int]) -> FoundEnded:
    text = (context.job.views[ranks[0]].log.exception or "").partition(": ")[2]
    reason, _, operation = text.partition(_OPERATION)
    reason = reason.removeprefix("Cannot apply desired operation").lstrip(":").strip()
    reason = reason.removeprefix("due to ").rstrip(".")
    cause = Ended(
        kind=_kind_of(reason),
        why="exception",
        root_cause=True,
        blamed_by="undecided",
        victims=ranks,
        confidence="medium",
        ranks=ranks,
        processes=processes_of(context, ranks),
        how="refused-call",
    )
    return FoundEnded(cause, ranks[0], ranks, [], reason, operation)


def _kind_of(reason: str) -> Kind:
    kind = "mismatch/" + reason.split(" ")[0]
    if kind in get_args(Kind):
        return cast(Kind, kind)
    return "missing" if "did not take part" in reason else "dead"


def _named_by_refusal(
    context: Context, ended: list[int], teller: int, victims: list[int]
) -> FoundEnded:
    """Return ranks of which the refusals say that they had ended, while nobody saw how."""
    views = context.job.views
    known = [rank for rank in ended if rank in views]
    finished = bool(known) and views[known[0]].exit.kind in ("leaving", "clean")
    cause = Ended(
        kind="dead",
        why="finished" if finished else "unknown",
        root_cause=True,
        culprits=ended,
        blamed_by="exit",
        victims=victims,
        confidence="medium",
        ranks=ended,
        processes=processes_of(context, ended),
        how="named-by-refusal",
    )
    return FoundEnded(cause, teller, victims, [])
