"""Causes that follow from others, and are no root causes."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Case, Context
from commlens.model.cause import Cause, ToldByErrors

# a rank that was awaited for less when the job was ended may only have been late
_LATE_NS = 5_000_000_000


def demote_consequences(cases: list[Case]) -> None:
    """Of several causes that blame the same ranks, keep the earliest disagreement as the root
    cause.
    """
    roots = [case for case in cases if case.claim.root_cause]
    disagreements = [
        case for case in roots if case.mismatch is not None or case.claim.why == "skipped"
    ]
    for case in roots:
        for other in disagreements:
            if (
                other is not case
                and other.claim.root_cause
                and _follows(case, other, case in disagreements)
            ):
                case.claim.root_cause = False
                other.blocked = max(other.blocked, case.blocked)
                victims = {*other.claim.victims, *case.claim.victims} - set(other.claim.culprits)
                other.claim.victims = sorted(victims)
                break


def demote_cut_waits(context: Context) -> None:
    """Demote ranks that may only have been late: the waits for them ended early, because others
    disagreed, one died, or all were ended.
    """
    views = context.job.views
    roots = [case for case in context.cases if case.claim.root_cause]
    disagree = any(case.mismatch is not None for case in roots)
    died = any(case.claim.kind == "dead" for case in roots)
    for claim in (case.claim for case in roots if case.claim.kind == "missing"):
        refused = [views[rank].exit.refused for rank in claim.victims if rank in views]
        if _was_late(context, claim, died=died) or (disagree and refused and all(refused)):
            claim.root_cause = False


def _was_late(context: Context, claim: Cause, *, died: bool) -> bool:
    """Return whether the missing ranks may only have been late when the wait for them ended."""
    views = context.job.views
    if claim.why == "finished" or isinstance(claim, ToldByErrors):  # whose wait timed out
        return False
    if any(views[rank].exit.gave_up for rank in claim.victims if rank in views):
        return False
    ended = bool(claim.culprits) and all(
        views[rank].exit.kind == "terminated" for rank in claim.culprits if rank in views
    )
    limit_ns = 0
    if died:
        limit_ns = context.job.stall_timeout_ns
    elif ended:
        limit_ns = min(context.job.stall_timeout_ns, _LATE_NS)
    return context.longest_wait(claim.victims) < limit_ns


def demote_ended_victims(context: Context) -> None:
    """Where a rank ended, ranks that are absent because they ended because of a peer are a
    consequence, and so is what broke off.
    """
    claims = [case.claim for case in context.cases]
    for claim in claims:
        exits = {
            context.job.views[rank].exit.kind
            for rank in claim.culprits
            if rank in context.job.views
        }
        ended = claim.kind == "missing" and exits and exits <= {"peer", "terminated"}
        broke_off = claim.kind == "stuck-inside" and not claim.culprits
        if (ended or broke_off) and any(
            other.root_cause and (other.kind == "dead" or other.why == "finished")
            for other in claims
            if other is not claim
        ):
            claim.root_cause = False


def _follows(case: Case, other: Case, disagrees: bool) -> bool:
    """Return whether ``case`` is a consequence of the disagreement ``other``."""
    mine, theirs = case.claim, other.claim
    if not _blamed(case) or not _blamed(case) <= _blamed(other):
        return False
    if mine.kind == "dead":
        # torch raises where the arguments of a call are wrong in themselves
        refused = theirs.blamed_by == "arguments" and case.frame == other.frame
        return refused or (mine.why == "exit" and other.blocked > 0)
    if disagrees:
        return case.order > other.order
    return other.blocked > 0 or (mine.why == "finished" and theirs.why == "skipped")


def _blamed(case: Case) -> set[int]:
    """Return the culprits; of a tie, all ranks that disagree."""
    claim = case.claim
    return set(claim.culprits or (claim.victims if case.mismatch is not None else ()))
