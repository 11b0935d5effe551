"""Words about faults that exceptions show, of torch and of strict verification: "rank 1 passes 12
parameters to DDP where ranks 0,2-3 pass 14 parameters to DDP, as torch's own check tells".
"""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.told_by_errors import RefusedCase
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import ErrorReport, Side, ToldByErrors
from commlens.model.refusal import RefusedRow
from commlens.text import (
    capital,
    frame_phrase,
    joined,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    sentence,
    verb,
)

_SHOWN = 4
_DO: dict[ErrorReport, tuple[str, str]] = {
    "op": ("issues {}", "issue {}"),
    "shape": ("passes a tensor of shape {}", "pass tensors of shape {}"),
    "dtype": ("passes a tensor of dtype {}", "pass tensors of dtype {}"),
    "parameters": ("passes {} to DDP", "pass {} to DDP"),
}
"""The verb for one rank, and for several."""


def words(context: Context, case: Case[ToldByErrors]) -> Words:
    """Return the words of a finding about ranks that errors name."""
    cause = case.cause
    line = frame_phrase(context.job.views[cause.raised[0]].exit.source)
    say = {
        "checkpoint": _failed,
        "not-exchanged": _not_exchanged,
        "sizes": _too_large,
        "barrier": _absent,
    }.get(cause.report, _differ)
    # ranks that raised the same share a sentence
    texts = [sentence(end) for end in phrases.exits_alike(context, cause.raised)[:_SHOWN]]
    return say(context, cause, f" at {line}" if line else "")._replace(evidence=texts)


def _differ(context: Context, cause: ToldByErrors, at: str) -> Words:
    culprits, told = cause.culprits, {rank for side in cause.sides for rank in side.ranks}
    usual, *others = cause.sides
    shown = [*others[: _SHOWN - 1], usual] if culprits else cause.sides[:_SHOWN]
    numbers = (
        ""
        if cause.global_ranks
        else "The numbers in the texts are those of a smaller group's ranks."
    )
    return Words(
        summary=f"{' where '.join(_sides(cause.report, shown))}, as torch's own check tells",
        explanation=phrases.prose(
            f"{capital(ranks_phrase(cause.raised))} raised its error{at}.", numbers
        ),
        next_step=_differ_step(cause),
        would_raise_confidence=(
            None
            if culprits and len(told) == context.job.size
            else (
                f"The texts tell what {ranks_phrase(told)} did, not the others."
                if culprits
                else "The texts do not tell which side is wrong."
            )
        ),
    )


def _not_exchanged(_: Context, cause: ToldByErrors, __: str) -> Words:
    sides = _sides("parameters", cause.sides[:_SHOWN])
    return Words(
        summary=(
            f"DDP's check on {ranks_phrase(cause.raised)} read"
            " numbers of parameters that their ranks do not have: the exchange of these numbers"
            " failed, and no model is known to differ"
        ),
        explanation=f"By their own errors, {joined(sides)}.",
        next_step=(
            "check that a collective of these ranks moves data: gather each rank's number before"
            " DDP and print it; if it arrives as 0, try NCCL_P2P_DISABLE=1, for where GPUs cannot"
            " write to each other (IOMMU, ACS) nothing arrives; also compare the collectives"
            " that each rank issued before"
        ),
        would_raise_confidence="The texts do not tell why the exchange failed.",
    )


def _sides(report: ErrorReport, sides: Sequence[Side]) -> list[str]:
    return [
        ranks_and_verb(side.ranks, *(do.format(side.did) for do in _DO[report])) for side in sides
    ]


def _differ_step(cause: ToldByErrors) -> str:
    subject = ranks_phrase(cause.culprits) if cause.culprits else "these ranks"
    if cause.report == "parameters":
        return (
            f"compare the model of {subject} with that of the others: its parameters, and those"
            " that DDP ignores"
        )
    comes = verb(cause.culprits or cause.raised, "comes", "come")
    return f"find out why {subject} {comes} to another collective"


def _failed(_: Context, cause: ToldByErrors, at: str) -> Words:
    culprits, named = cause.culprits, cause.named
    error = (cause.error or "").partition(". ")[0]
    others = sorted(set(cause.raised) - set(culprits))
    subject = f"{ranks_phrase(named) if named else 'a rank'}{'' if culprits else ' of its group'}"
    return Words(
        summary=(
            f"{subject} failed in a distributed checkpoint{at}{f': {error}' if error else ''}"
        ),
        explanation=(
            f"{capital(ranks_and_verb(others, 'raises', 'raise'))} its error: a checkpoint fails on"
            " all ranks."
            if others
            else ""
        ),
        next_step=(
            f"look at the file {cause.file}: its size, its owner, and how it was written"
            if cause.file
            else f"look at the files of the checkpoint that {subject}"
            f" {verb(culprits, 'reads or writes', 'read or write')}"
        ),
        would_raise_confidence=(
            None if culprits else "The texts do not name one rank of the whole job."
        ),
    )


def _absent(_: Context, cause: ToldByErrors, at: str) -> Words:
    subject = f"{ranks_phrase(cause.named)}{'' if cause.global_ranks else ' of their group'}"
    return Words(
        summary=(
            f"{subject} did not come to the monitored barrier{at}, as the error of its first rank"
            " tells"
        ),
        next_step=(
            f"look at the last lines of the output of {subject}; in the next run, take a stack"
            " (py-spy dump) before the barrier's timeout"
        ),
        would_raise_confidence=(
            "That error may name only the first rank that did not come (wait_all_ranks=False), and"
            " no line tells what it did instead."
            if len(cause.named) == 1
            else "No line tells what they did instead."
        ),
    )


def _too_large(context: Context, cause: ToldByErrors, at: str) -> Words:
    of_nccl = "NCCL" in (context.job.views[cause.raised[0]].log.exception or "")
    settings = ", or their settings of NCCL differ (NCCL_PROTO, NCCL_ALGO)" if of_nccl else ""
    return Words(
        summary=(
            f"{ranks_phrase(cause.raised)} received {cause.error}: ranks pass tensors of different"
            f" sizes to one collective{settings}"
        ),
        next_step=(f"compare the sizes that all ranks pass{at or ' to their last collective'}"),
        would_raise_confidence="The records of `commlens launch` would show the size on each rank.",
    )


def words_of_refused(context: Context, case: RefusedCase) -> Words:
    """Return what a finding says about refused calls."""
    say = {
        "cycle": _refused_cycle,
        "wrong-arguments": _refused_arguments,
        "ended": _refused_absent,
        "not-arrived": _refused_absent,
        "disagreement": _refused_disagreement,
    }
    return say[case.cause.refused_for](context, case)


def _refused_cycle(_: Context, case: RefusedCase) -> Words:
    steps = [
        f"{rank_phrase(wait.rank)} waits in {wait.collective}"
        + (f" ({wait.where})" if wait.where else "")
        + f" for {ranks_phrase(wait.absent)}"
        for wait in case.refusal.waits
    ]
    ranks = ranks_phrase(sorted(wait.rank for wait in case.refusal.waits))
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


def _refused_arguments(context: Context, case: RefusedCase) -> Words:
    view = context.job.views.get(case.cause.culprits[0])
    where = view.exit.source.where if view is not None and view.exit.source is not None else ""
    return Words(
        summary=case.refusal.reason,
        explanation=f"Strict verification refused {case.refusal.operation}.",
        next_step=f"correct the arguments of this call{f' at {where}' if where else ''}",
    )


def _refused_absent(context: Context, case: RefusedCase) -> Words:
    cause, views = case.cause, context.job.views
    known = [rank for rank in cause.absent if rank in views]
    met = next(map(op_phrase, case.ops.values()), "a call of the others")
    did = "ended without" if cause.refused_for == "ended" else "did not take part in"
    return Words(
        summary=(
            f"{ranks_and_verb(cause.absent, did, did)} {met}; strict verification refused it on"
            f" {ranks_phrase(cause.raised)}"
        ),
        explanation=phrases.prose(
            *(
                f"{phrases.name(context, rank)} {phrases.exit_words(views[rank].exit)};"
                f" {phrases.last(context, rank)}."
                for rank in known[:2]
                if views[rank].exit.kind != "alive"
            )
        ),
        next_step=f"look at the end of the output of {ranks_phrase(cause.absent)}",
        evidence=phrases.exits(context, case.cause.raised),
        would_raise_confidence="Only the refusals tell it: nobody saw how it ended.",
    )


def _refused_disagreement(context: Context, case: RefusedCase) -> Words:
    raised, refusal = ranks_phrase(case.cause.raised), case.refusal
    return Words(
        summary=f"strict verification refused a call on {raised}: {refusal.reason}",
        explanation=f"It was {refusal.operation}.",
        next_step="compare the arguments with which these ranks make this call",
        evidence=[_row(refusal.heading, row) for row in refusal.rows]
        or phrases.exits(context, case.cause.raised),
        would_raise_confidence="The exception's whole text is in the output of these ranks.",
    )


def _row(heading: str, row: RefusedRow) -> str:
    """``"Input shapes of x, rank 0: [2] float32 (train.py:21 in main)"``."""
    of = f" of {row.argument}" if row.argument else ""
    where = f" ({row.where})" if row.where else ""
    return f"{heading}{of}, {ranks_phrase(row.ranks)}: {' '.join(filter(None, row.cells))}{where}"
