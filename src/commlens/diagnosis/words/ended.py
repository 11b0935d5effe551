"""Words about processes that failed, where nothing else tells why."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.ended import FoundEnded
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.exits import exit_words
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.known_errors import known_step, peer_step
from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.diagnosis.words.phrases import prose
from commlens.text import ranks_and_verb, ranks_phrase


def words(context: Context, found: FoundEnded) -> Words:
    """Return what a finding says about processes that failed."""
    match found.cause.how:
        case "after-a-peer":
            return _after_a_peer(context, found)
        case "unobserved":
            return _unobserved(context, found)
        case "from-outside":
            return _from_outside(context, found)


def _after_a_peer(context: Context, found: FoundEnded) -> Words:
    first, suspects = found.first, found.cause.culprits
    which = "no record shows which peer"
    if found.silent:
        which = f"no line tells anything of {ranks_phrase(found.silent)}"
    where = ranks_phrase(suspects) if suspects else "all ranks, and of the other nodes,"
    errors = [context.job.views[rank].log.exception for rank in found.failed]
    return Words(
        summary=(
            f"{ranks_phrase(found.cause.ranks)} ended because a peer ended or did not answer;"
            f" {which}"
        ),
        explanation=(
            f"{phrases.name(context, first)} was the first to end: it"
            f" {exit_words(context.job.views[first].exit)}; {phrases.last(context, first)}."
        ),
        next_step=(
            next(filter(None, map(known_step, errors)), "")
            or next(filter(None, map(peer_step, errors)), "")
            or f"look at the output of {where} for the first error"
        ),
        evidence=phrases.exits(context, found.failed),
        would_raise_confidence="The records of the missing ranks would show it.",
    )


def _unobserved(context: Context, found: FoundEnded) -> Words:
    gone = found.cause.ranks
    others = phrases.ended_like_the_first(context, found.failed)
    return Words(
        summary=f"{ranks_and_verb(gone, 'is', 'are')} gone, and nobody saw how; {others}",
        waits=others,
        explanation=f"{phrases.name(context, gone[0])}: {phrases.last(context, gone[0])}.",
        next_step=(
            f"look at the end of the output of {ranks_phrase(gone)}, and at the scheduler's log"
        ),
        would_raise_confidence=(
            "The system's log (dmesg, the scheduler) may show how it ended; `commlens launch`"
            " records it."
        ),
    )


def _from_outside(context: Context, found: FoundEnded) -> Words:
    first, signal = found.first, found.cause.signal or ""
    return Words(
        summary=(
            f"the job was ended from outside: {phrases.ended_like_the_first(context, found.failed)}"
        ),
        explanation=prose(
            f"{phrases.name(context, first)} {exit_words(context.job.views[first].exit)};"
            f" {phrases.last(context, first)}.",
            outside_cause(signal),
        ),
        next_step=outside_step(signal),
        would_raise_confidence="The signal is known, its sender is not.",
    )
