"""What is printed about ranks that died: a verdict, or a line if an earlier verdict explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.text import ranks_phrase
from commlens.watch.reporting import Reporter
from commlens.watch.roster import Member
from commlens.watch.stall import explains, leaves_standing


def lines_at_end(members: Sequence[Member]) -> list[str]:
    """Name the ranks without a record if all ranks of this node ended, not normally, before any of
    them had left init_process_group.
    """
    seen = [
        member
        for member in members
        if member.here and member.box is not None and member.status is not None
    ]
    unrecorded = sorted(
        set(range(max((member.world_size for member in seen), default=0)))
        - {member.rank for member in members}
    )
    initialised = any(member.status is not None and member.status.initialised for member in seen)
    if not unrecorded or initialised or any(member.alive or member.ended_well for member in seen):
        return []
    them = "it" if len(unrecorded) == 1 else "they"
    return [
        f"{ranks_phrase(member.rank for member in seen)} ended before init_process_group had"
        f" returned. There is no record of {ranks_phrase(unrecorded)}: {them} may have been killed"
        " before recording began, or run on another node."
    ]


def report_death(
    reporter: Reporter,
    dead: Sequence[Member],
    elsewhere: Sequence[int],
    *,
    earlier: Verdict | None,
    has_reported: Callable[[Verdict], bool],
) -> None:
    """Diagnose the death of ranks and report it.

    Args:
        reporter: of the job.
        dead: the ranks of this node that died.
        elsewhere: those of other nodes.
        earlier: the verdict on the current stall, if there is one.
        has_reported: returns whether a verdict is on a mismatch that was reported before.
    """
    verdict = reporter.diagnose()
    ranks = ranks_phrase([*(member.rank for member in dead), *elsewhere])
    was_killed = any(member.ending is not None and member.ending.signal for member in dead)
    waiting: set[int] = set()
    if earlier is not None and earlier.is_fault:
        waiting = {*earlier.victims, *(earlier.culprits if earlier.kind == "cycle" else ())}
    are_victims = {member.rank for member in dead} <= waiting
    if dead and are_victims and not was_killed:
        error = next(
            (
                f" ({each.exception})"
                for each in reporter.logs
                if each.rank == dead[0].rank and each.exception
            ),
            "",
        )
        reporter.tell(f"{ranks} gave up waiting{error}; the verdict above stands.")
    elif dead and earlier is not None and leaves_standing(verdict, earlier):
        reporter.tell(f"{ranks} ended while the job hung; the verdict above stands.")
    elif has_reported(verdict):
        reporter.report(
            verdict, f"{ranks} ended because of the mismatch; the verdict above stands."
        )
    elif verdict.kind not in NOTHING_FOUND:
        reporter.report(verdict)
        if earlier is not None and verdict.kind == "dead" and explains(verdict, earlier):
            late = ranks_phrase(earlier.culprits or earlier.victims)
            reporter.say(
                f"the earlier verdict on {late} no longer holds: the wait was for {ranks}."
            )
