"""Sentences about the records that a verdict is made from, and about those that are missing."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.text import capital, count, ranks_phrase, verb

_HOSTS_MAX = 4

INCOMPLETE = (
    "The ranks wait in too many different collectives: only some of them were followed to their"
    " causes."
)


def looked_at(job: JobIndex) -> str:
    """``"4 ranks, 812 records of 3 groups"``."""
    total = sum(len(view.history) for view in job.views.values())
    ranks = count(len(job.views), "rank")
    of = f" of {job.size}" if job.size != len(job.views) else ""
    unseen = sorted({text for view in job.views.values() for text in view.log.coverage})
    without = f"; not recorded: {'; '.join(unseen)}" if unseen else ""
    groups = {key[1:] for key in job.channels}
    return f"{ranks}{of}, {count(total, 'record')} of {count(len(groups), 'group')}{without}"


def counted_only(ranks: int) -> str:
    """``"; 99,936 more ranks wait like some of these"``."""
    return f"; {count(ranks, 'more rank')} {'waits' if ranks == 1 else 'wait'} like some of these"


def missing_evidence(job: JobIndex) -> list[str]:
    """Return sentences about ranks without records, unreadable records and overwritten ones."""
    return [
        *_no_record(job),
        *_elsewhere(job),
        *_lost_heads(job),
        *(f"{capital(ranks_phrase(ranks))}: {text}." for text, ranks in _problems(job).items()),
    ]


def left_no_record(ranks: Sequence[int], size: int) -> str:
    """``"Rank 3 of 4 left no record."``."""
    return f"{capital(ranks_phrase(ranks))} of {size} left no record."


def _no_record(job: JobIndex) -> list[str]:
    notes = []
    if lost := [rank for rank in job.no_record if rank not in job.strangers]:
        notes.append(
            f"{capital(ranks_phrase(lost))} of {job.size} {verb(lost, 'has', 'have')} no line."
            if job.only_logs
            else left_no_record(lost, job.size)
        )
    return notes + [
        f"Rank {rank} (pid {log.pid}) is not recorded: {log.unrecorded}."
        for rank, log in sorted(job.strangers.items())
    ]


def _elsewhere(job: JobIndex) -> list[str]:
    if not job.elsewhere:
        return []
    if job.meets_here:
        return [left_no_record(job.elsewhere, job.size)]
    hosts = sorted({view.log.host for view in job.views.values() if view.log.host})
    of = f" of {', '.join(hosts[:_HOSTS_MAX])}" if hosts else ""
    return [
        f"There are no records of {ranks_phrase(job.elsewhere)} of {job.size}, which probably run"
        f" on another node: only those{of} are here."
    ]


def _lost_heads(job: JobIndex) -> list[str]:
    lost = [rank for rank, view in job.views.items() if view.log.head_lost]
    if not lost:
        return []
    device = verb(lost, "its device waits", "their devices wait")
    entries = max(len(job.views[rank].history) for rank in lost)
    return [
        f"{capital(ranks_phrase(lost))}: the collective in which {device} is overwritten, since"
        f" more than {entries} were issued after it; it is older than the one named here"
        " (COMMLENS_BOX_ENTRIES)."
    ]


def _problems(job: JobIndex) -> dict[str, list[int]]:
    """Return the problems of records, and the ranks that have each."""
    by_text: dict[str, list[int]] = {}
    for rank, view in job.views.items():
        for text in [*view.log.problems, *_overwritten(view)]:
            by_text.setdefault(text.rstrip("."), []).append(rank)
    return by_text


def _overwritten(view: RankView) -> list[str]:
    dropped = view.log.issued - len(view.history)
    if dropped <= 0 or view.log.problems:
        return []
    are = "is" if dropped == 1 else "are"
    active = view.columns is not None and view.columns.dump.only_active
    left_out = " or left out of the dump" if active else ""
    return [f"the oldest {count(dropped, 'record')} {are} overwritten{left_out}"]
