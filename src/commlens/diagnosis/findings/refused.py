"""Refusals by strict verification, where the records do not show their cause.

Diagnosis reads a refusal's fields, not its text.
"""

from __future__ import annotations

from typing import get_args

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.phrases import prose
from commlens.model.cause import Cause, Kind
from commlens.model.refusal import Refusal
from commlens.model.verdict import Finding
from commlens.text import capital, op_phrase, ranks_and_verb, ranks_phrase

_OF_ARGUMENTS: Kind = "mismatch/op"  # of a user's function: structure, value, argument


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
    """Demote findings that blame ranks only because a refusal ended them.

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
            if isinstance(claim, Cause):
                claim.blamed_by = "exit"
        blamed = {*claim.culprits}
        ended = blamed and blamed <= {*refusals} - named
        if ended and all(
            refusals[rank].absent or refusals[rank].culprits or refusals[rank].kind == "cycle"
            for rank in blamed
        ):
            claim.root_cause = False


def find_refused(context: Context) -> None:
    """Report the refusals that ended the job, if nothing else is its cause."""
    refusals = refused_ranks(context)
    if not refusals:
        return
    victims = sorted(refusals)
    view = context.job.views[victims[0]]
    # the ranks may have raised different ones: the oldest is the cause
    first = next(iter(refusals.values()))
    if wrong := next((each for each in refusals.values() if each.culprits), None):
        context.add(_wrong_arguments(context, wrong, victims), None, None)
    elif ended := sorted(named_absent(context) - {*refusals}):
        teller = next(rank for rank, each in refusals.items() if {*ended} & {*each.absent})
        finding = _absent(context, ended, refusals[teller], context.job.views[teller], victims)
        context.add(finding, None, context.job.views[teller].exit.source)
    elif cycle := next((each for each in refusals.values() if each.kind == "cycle"), None):
        context.add(_cycle(cycle, victims), None, None)
    else:
        context.add(_other(context, first, victims), None, view.exit.source)


def _cycle(refusal: Refusal, victims: list[int]) -> Finding:
    steps = [
        f"rank {wait.rank} waits in {wait.collective}"
        + (f" ({wait.where})" if wait.where else "")
        + f" for {ranks_phrase(wait.absent)}"
        for wait in refusal.waits
    ]
    ranks = sorted(wait.rank for wait in refusal.waits)
    return Finding(
        kind="cycle",
        why="in-collective",
        root_cause=True,
        culprits=[],
        victims=sorted({*victims, *ranks}),
        confidence="medium",
        summary=f"{ranks_phrase(ranks)} wait for each other; strict verification refused it",
        explanation=f"{capital('; '.join(steps))}.",
        next_step=f"compare the order of the calls of {ranks_phrase(ranks)} at these lines",
        evidence=[f"{step}." for step in steps],
        would_raise_confidence=(
            "A run with some successful steps before the fault would show which rank departs from"
            " its routine."
        ),
    )


def _wrong_arguments(context: Context, refusal: Refusal, victims: list[int]) -> Finding:
    """Return the finding for a call that is wrong whatever the other ranks do."""
    culprits = sorted(refusal.culprits)
    view = context.job.views.get(culprits[0])
    where = view.exit.source.where if view is not None and view.exit.source is not None else ""
    return Finding(
        kind=_kind(refusal),
        why="user-code",
        root_cause=True,
        culprits=culprits,
        victims=sorted({*victims} - {*culprits}),
        confidence="high",
        summary=refusal.reason,
        explanation=f"Strict verification refused {refusal.operation}.",
        next_step=f"correct the arguments of this call{f' at {where}' if where else ''}",
    )


def _absent(
    context: Context, ended: list[int], refusal: Refusal, teller: RankView, victims: list[int]
) -> Finding:
    """Return the finding for ranks of which the refusals say that they had ended or did not come,
    while nobody saw how.
    """
    known = [rank for rank in ended if rank in context.job.views]
    op = teller.last_op
    meeting = f" {op_phrase(op)}" if op is not None else " a call of the others"
    did = "ended without" if refusal.kind == "dead" else "did not take part in"
    finished = known and context.job.views[known[0]].exit.kind in ("leaving", "clean")
    return Finding(
        kind="dead" if refusal.kind == "dead" else "missing",
        why="finished" if finished else "unknown",
        root_cause=True,
        culprits=ended,
        victims=victims,
        confidence="medium",
        summary=(
            f"{ranks_and_verb(ended, did, did)}{meeting}; strict verification refused it on"
            f" {ranks_phrase(victims)}"
        ),
        explanation=prose(
            *(
                f"{phrases.name(context, rank)} {context.job.views[rank].exit.text};"
                f" {phrases.last(context, rank)}."
                for rank in known[:2]
                if context.job.views[rank].exit.text
            )
        ),
        next_step=f"look at the end of the output of {ranks_phrase(ended)}",
        evidence=[f"rank {rank} {context.job.views[rank].exit.text}." for rank in victims[:4]],
        would_raise_confidence="Only the refusals tell it: nobody saw how it ended.",
    )


def _other(context: Context, refusal: Refusal, victims: list[int]) -> Finding:
    """Return the finding for a refusal that no record explains: of a call of a user's function."""
    return Finding(
        kind=_kind(refusal),
        why="exception",
        root_cause=True,
        culprits=[],
        victims=victims,
        confidence="medium",
        summary=f"strict verification refused a call on {ranks_phrase(victims)}: {refusal.reason}",
        explanation=f"It was {refusal.operation}.",
        next_step="compare the arguments with which these ranks make this call",
        evidence=[f"rank {rank} {context.job.views[rank].exit.text}." for rank in victims[:4]],
        would_raise_confidence="The exception's whole text is in the output of these ranks.",
    )


def _kind(refusal: Refusal) -> Kind:
    return next((kind for kind in get_args(Kind) if kind == refusal.kind), _OF_ARGUMENTS)
