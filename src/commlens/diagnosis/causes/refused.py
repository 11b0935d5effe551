"""Refusals by strict verification, where the records do not show their cause.

Diagnosis reads a refusal's fields, not its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from commlens.diagnosis.causes.context import Context, collective_of, processes_of
from commlens.model.cause import Kind, RankWait, Refused
from commlens.model.collective import Collective
from commlens.model.refusal import Refusal

_OF_ARGUMENTS: Kind = "mismatch/op"  # of a user's function: structure, value, argument


@dataclass
class FoundRefused:
    """Calls that were refused, and the evidence."""

    cause: Refused
    refusal: Refusal
    op: Collective | None = None  # for which ranks were absent


def refused_ranks(context: Context) -> dict[int, Refusal]:
    """Return the refusals that ended ranks, by rank."""
    return {
        rank: view.log.refusal
        for rank, view in sorted(context.job.views.items())
        if view.log.refusal is not None and view.exit.refused
    }


def named_absent(context: Context) -> set[int]:
    """Return the ranks of which refusals say that they have ended or did not arrive."""
    return {rank for each in refused_ranks(context).values() for rank in each.absent}


def demote_refused(context: Context) -> None:
    """Demote causes that blame ranks only because a refusal ended them.

    A refusal names the rank that is the cause, or a cycle. A rank that raised one and is not named
    was waiting.
    """
    refusals = refused_ranks(context)
    named = named_absent(context)
    for claim in (case.claim for case in context.cases):
        if not claim.root_cause or claim.kind not in ("missing", "stuck-inside", "waiting"):
            continue
        if not claim.culprits and claim.why == "finished" and named & {*claim.victims}:
            # a tie for the records: the refusal decides
            claim.culprits = sorted(named & {*claim.victims})
            claim.victims = sorted({*claim.victims} - named)
            claim.confidence = "medium"
            claim.blamed_by = "exit"
        blamed = {*claim.culprits}
        ended = blamed and blamed <= {*refusals} - named
        if ended and all(
            refusals[rank].absent or refusals[rank].culprits or refusals[rank].kind == "cycle"
            for rank in blamed
        ):
            claim.root_cause = False


def find_refused(context: Context) -> None:
    """Find why strict verification ended the job, if nothing else is its cause."""
    refusals = refused_ranks(context)
    if not refusals:
        return
    views, raised = context.job.views, sorted(refusals)
    if wrong := next((each for each in refusals.values() if each.culprits), None):
        context.add(_wrong_arguments(wrong, raised), None, None)
    elif ended := sorted(named_absent(context) - {*refusals}):
        teller = next(rank for rank, each in refusals.items() if {*ended} & {*each.absent})
        found = _absent(context, ended, refusals[teller], views[teller].last_op, raised)
        context.add(found, None, views[teller].exit.source)
    elif cycle := next((each for each in refusals.values() if each.kind == "cycle"), None):
        context.add(_cycle(cycle, raised), None, None)
    else:
        # the ranks may have raised different ones: that of the first is told
        context.add(_other(refusals[raised[0]], raised), None, views[raised[0]].exit.source)


def _cycle(refusal: Refusal, raised: list[int]) -> FoundRefused:
    cause = Refused(
        kind="cycle",
        why="in-collective",
        root_cause=True,
        blamed_by="undecided",
        victims=sorted({*raised, *(wait.rank for wait in refusal.waits)}),
        confidence="medium",
        refused_for="cycle",
        raised=raised,
        waits=[RankWait(wait.rank, list(wait.absent)) for wait in refusal.waits],
    )
    return FoundRefused(cause, refusal)


def _wrong_arguments(refusal: Refusal, raised: list[int]) -> FoundRefused:
    """Return a call that is wrong whatever the other ranks do."""
    culprits = sorted(refusal.culprits)
    cause = Refused(
        kind=_kind(refusal),
        why="user-code",
        root_cause=True,
        culprits=culprits,
        blamed_by="arguments",
        victims=sorted({*raised} - {*culprits}),
        confidence="high",
        refused_for="wrong-arguments",
        raised=raised,
    )
    return FoundRefused(cause, refusal)


def _absent(
    context: Context,
    absent: list[int],
    refusal: Refusal,
    op: Collective | None,
    raised: list[int],
) -> FoundRefused:
    """Return the ranks that refusals report as ended or absent, if no record shows their end."""
    known = [rank for rank in absent if rank in context.job.views]
    finished = known and context.job.views[known[0]].exit.kind in ("leaving", "clean")
    ended = refusal.kind == "dead"
    cause = Refused(
        kind="dead" if ended else "missing",
        why="finished" if finished else "unknown",
        root_cause=True,
        culprits=list(absent),
        blamed_by="exit" if ended else "absence",
        victims=list(raised),
        confidence="medium",
        refused_for="ended" if ended else "not-arrived",
        raised=raised,
        absent=absent,
        processes=processes_of(context, absent),
        collective=collective_of(op) if op is not None else None,
    )
    return FoundRefused(cause, refusal, op)


def _other(refusal: Refusal, raised: list[int]) -> FoundRefused:
    """Return a refusal that no record explains: of a call of a user's function."""
    cause = Refused(
        kind=_kind(refusal),
        why="exception",
        root_cause=True,
        blamed_by="undecided",
        victims=list(raised),
        confidence="medium",
        refused_for="disagreement",
        raised=raised,
    )
    return FoundRefused(cause, refusal)


def _kind(refusal: Refusal) -> Kind:
    return next((kind for kind in get_args(Kind) if kind == refusal.kind), _OF_ARGUMENTS)
