"""Ranks that exist twice: the launcher starts ranks, and each of them starts all ranks again."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.model.verdict import Finding
from commlens.text import capital, ranks_and_verb


def find_twins(context: Context) -> None:
    """Make one finding of the ranks that several processes have, if anything is wrong: all else is
    then a consequence.

    Where nothing is wrong, the processes may have met one after the other.
    """
    views = context.job.views
    twins = {
        rank: view.log.twins for rank, view in sorted(views.items()) if len(view.log.twins) > 1
    }
    if not twins or not any(case.claim.root_cause for case in context.cases):
        return
    script = (
        next(
            (
                view.log.script.partition(" ")[0].rpartition("/")[2]
                for view in views.values()
                if view.log.script
            ),
            "",
        )
        or "the script"
    )
    told = [
        f"rank {rank}: {', '.join(f'pid {pid}, started by pid {by}' for pid, by in claims[:4])}"
        for rank, claims in twins.items()
    ]
    finding = Finding(
        kind="mismatch/group",
        why="initialising",
        root_cause=True,
        culprits=[],
        victims=sorted(views),
        confidence="high",
        summary=(
            f"{ranks_and_verb(twins, 'exists', 'exist')} twice: the launcher starts ranks, and each"
            " of them starts ranks of the same numbers again, which meet at one place"
        ),
        explanation=f"{capital('; '.join(told[:4]))}.",
        next_step=f"start {script} without the launcher, or let it start no processes of its own",
    )
    for case in context.cases:
        case.claim.root_cause = False
    context.add(finding, None, None, blocked=len(views))
