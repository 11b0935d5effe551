"""A job in which no fault shows: nothing is wrong, or a part of the evidence is unreadable."""

from __future__ import annotations

from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import NoFault, NoFaultState

_UNDETERMINED = ("unreadable", "logs-tell-none", "newest-unreadable", "files-unreadable")


def no_fault(job: JobIndex, unread: int) -> NoFault:
    """Return why no fault shows.

    Args:
        job: the indexed ranks.
        unread: number of files that could not be read, and may belong to ranks without records.
    """
    cut = [rank for rank, view in job.views.items() if view.log.problems and view.lost_newest]
    complete = len(job.views) == job.size
    state = _state(job, cut, unread, complete=complete)
    undetermined = state in _UNDETERMINED
    return NoFault(
        kind="undetermined" if undetermined else "healthy",
        why="unknown",
        root_cause=False,
        blamed_by="nobody",
        confidence="low" if undetermined else "high" if complete else "medium",
        state=state,
        ranks=list(job.views),
        finished=_finished(job),
        newest_unreadable=cut,
        files_unreadable=unread,
    )


def _state(job: JobIndex, cut: list[int], unread: int, *, complete: bool) -> NoFaultState:
    views = job.views.values()
    if not any(view.history for view in views) and all(view.log.problems for view in views):
        return "unreadable"
    if job.moving:
        return "running"
    if job.only_logs:
        return "logs-tell-none"
    if cut:
        return "newest-unreadable"
    if unread and not complete:
        return "files-unreadable"
    return "all-agree" if complete else "part-agrees"


def _finished(job: JobIndex) -> list[int]:
    ended = [rank for rank, view in job.views.items() if view.exit.kind == "clean"]
    return ended if job.knows.process_exit else []
