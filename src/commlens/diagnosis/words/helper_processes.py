"""Words about ranks that wait for processes that they started."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.helper_processes import HelpersCase
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.missing import about_waits
from commlens.diagnosis.words.phrases import activity_words, prose
from commlens.model.cause import HelperCall
from commlens.text import joined, op_phrase, rank_phrase, ranks_and_verb, ranks_phrase, verb

_SHOWN = 4


def words(context: Context, case: HelpersCase) -> Words:
    """Return what a finding says about ranks that wait for processes that they started."""
    cause, absence = case.cause, case.absence
    ops = joined(sorted({call.op for call in cause.inside}))
    theirs = verb(
        cause.ranks,
        f"a process that it started, which is in {ops}",
        f"processes that they started, which are in {ops}",
    )
    waiting = f"{ranks_and_verb(absence.waiting, 'waits', 'wait')} for {ranks_phrase(cause.ranks)}"
    without = (
        f" without {verb(cause.culprits, 'that', 'those')} of {ranks_phrase(cause.culprits)}"
        if cause.culprits
        else ""
    )
    first, *others = absence.ranks
    like = f"Like {ranks_phrase(others)}, " if others else ""
    return Words(
        summary=(
            f"{ranks_and_verb(cause.ranks, 'waits', 'wait')} for {theirs}{without};"
            f" {waiting} in {op_phrase(absence.edge.op)}"
        ),
        explanation=prose(
            f"{like}{phrases.name(context, first)} {activity_words(absence.doing)}.",
            *about_waits(context, absence),
        ),
        next_step=_next_step(case),
        evidence=places(cause.inside) + places(cause.outside),
        would_raise_confidence=(
            f"That {ranks_and_verb(cause.ranks, 'waits', 'wait')} for"
            f" {verb(cause.ranks, 'this process', 'these processes')} is inferred: the calls of"
            " processes that ranks start are not recorded, only their stacks were read."
        ),
    )


def _next_step(case: HelpersCase) -> str:
    cause, absence = case.cause, case.absence
    if cause.culprits:
        there = absence.doing.frame
        return (
            f"find out why {ranks_phrase(cause.culprits)} did not ask"
            f" {verb(cause.culprits, 'its process', 'their processes')} for what"
            f" {ranks_phrase(cause.ranks)} asked theirs"
            f"{f', before they came to {there.where}' if there is not None else ''}"
        )
    first = cause.inside[0]
    return f"look at process {first.pid} of {rank_phrase(first.rank)}, and at those that it meets"


def _place(call: HelperCall) -> str:
    if call.op:
        return f"is in {call.op} at {call.source}"
    return "waits for a request" if call.is_idle else f"is in no collective, but at {call.source}"


def places(calls: Sequence[HelperCall]) -> list[str]:
    """Return a sentence for each of these processes: where it stands."""
    return [
        f"Process {call.pid}, which {rank_phrase(call.rank)} started, {_place(call)}."
        for call in calls[:_SHOWN]
    ]
