"""Ranks that exist twice: the launcher starts ranks, and each of them starts all ranks again."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.causes.context import Context
from commlens.model.cause import Claims, StartedTwice


@dataclass
class FoundStartedTwice:
    """Ranks that exist twice, and the script that they run."""

    cause: StartedTwice
    script: str


def find_started_twice(context: Context) -> None:
    """Find the ranks that several processes have, if anything is wrong: all else is then a
    consequence.

    Where nothing is wrong, the processes may have met one after the other.
    """
    views = context.job.views
    claims = [
        Claims(rank, [pid for pid, _ in view.log.twins], [by for _, by in view.log.twins])
        for rank, view in sorted(views.items())
        if len(view.log.twins) > 1
    ]
    if not claims or not any(case.claim.root_cause for case in context.cases):
        return
    cause = StartedTwice(
        kind="mismatch/group",
        why="initialising",
        root_cause=True,
        blamed_by="nobody",
        victims=sorted(views),
        confidence="high",
        ranks=[one.rank for one in claims],
        claims=claims,
    )
    for case in context.cases:
        case.claim.root_cause = False
    script = next((view.log.script for view in views.values() if view.log.script), "")
    context.add(FoundStartedTwice(cause, script), None, None, blocked=len(views))
