"""Words about refusals by strict verification, where the records do not show their cause."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.refused import FoundRefused
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.exits import exit_words
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.model.refusal import RefusedRow
from commlens.text import capital, op_phrase, ranks_and_verb, ranks_phrase


def words(context: Context, found: FoundRefused) -> Words:
    """Return what a finding says about refused calls."""
    match found.cause.refused_for:
        case "cycle":
            return _cycle(found)
        case "wrong-arguments":
            return _wrong_arguments(context, found)
        case "ended" | "not-arrived":
            return _absent(context, found)
        case "disagreement":
            return _disagreement(context, found)


def _cycle(found: FoundRefused) -> Words:
    steps = [
        f"rank {wait.rank} waits in {wait.collective}"
        + (f" ({wait.where})" if wait.where else "")
        + f" for {ranks_phrase(wait.absent)}"
        for wait in found.refusal.waits
    ]
    ranks = ranks_phrase(sorted(wait.rank for wait in found.refusal.waits))
    return Words(
        summary=f"{ranks} wait for each other; strict verification refused it",
        explanation=f"{capital('; '.join(steps))}.",
        next_step=f"compare the order of the calls of {ranks} at these lines",
        evidence=[f"{step}." for step in steps],
        would_raise_confidence=(
            "A run with some successful steps before the fault would show which rank departs from"
            " its routine."
        ),
    )


def _wrong_arguments(context: Context, found: FoundRefused) -> Words:
    view = context.job.views.get(found.cause.culprits[0])
    where = view.exit.source.where if view is not None and view.exit.source is not None else ""
    return Words(
        summary=found.refusal.reason,
        explanation=f"Strict verification refused {found.refusal.operation}.",
        next_step=f"correct the arguments of this call{f' at {where}' if where else ''}",
    )


def _absent(context: Context, found: FoundRefused) -> Words:
    cause, views = found.cause, context.job.views
    known = [rank for rank in cause.absent if rank in views]
    meeting = f" {op_phrase(found.op)}" if found.op is not None else " a call of the others"
    did = "ended without" if cause.refused_for == "ended" else "did not take part in"
    return Words(
        summary=(
            f"{ranks_and_verb(cause.absent, did, did)}{meeting}; strict verification refused it on"
            f" {ranks_phrase(cause.raised)}"
        ),
        explanation=prose(
            *(
                f"{phrases.name(context, rank)} {exit_words(views[rank].exit)};"
                f" {phrases.last(context, rank)}."
                for rank in known[:2]
                if views[rank].exit.kind != "alive"
            )
        ),
        next_step=f"look at the end of the output of {ranks_phrase(cause.absent)}",
        evidence=phrases.exits(context, found.cause.raised),
        would_raise_confidence="Only the refusals tell it: nobody saw how it ended.",
    )


def _disagreement(context: Context, found: FoundRefused) -> Words:
    raised, refusal = ranks_phrase(found.cause.raised), found.refusal
    return Words(
        summary=f"strict verification refused a call on {raised}: {refusal.reason}",
        explanation=f"It was {refusal.operation}.",
        next_step="compare the arguments with which these ranks make this call",
        evidence=[_row(refusal.heading, row) for row in refusal.rows]
        or phrases.exits(context, found.cause.raised),
        would_raise_confidence="The exception's whole text is in the output of these ranks.",
    )


def _row(heading: str, row: RefusedRow) -> str:
    """``"Input shapes of x, rank 0: [2] float32 (train.py:21 in main)"``."""
    of = f" of {row.argument}" if row.argument else ""
    where = f" ({row.where})" if row.where else ""
    return f"{heading}{of}, {ranks_phrase(row.ranks)}: {' '.join(filter(None, row.cells))}{where}"
