"""Words about ranks that visibly work while others wait for them."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.missing import FoundWorking
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.absence import signs, waits
from commlens.diagnosis.words.activities import activity_words
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.model.cause import Working
from commlens.text import (
    capital,
    duration,
    frame_phrase,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_WORK = {
    "checkpoint-io": "busy with a checkpoint",
    "compilation": "compiling",
    "initialising": "initialising",
    "data-loading": "loading data",
    "finished": "shutting down",
}
_NO_WORK = {
    "checkpoint-io": "saving or loading",
    "compilation": "compiling",
    "initialising": "initialising",
}


def words(context: Context, found: FoundWorking) -> Words:
    """Return what a finding says about ranks that work."""
    cause, absence, op = found.cause, found.absence, found.absence.edge.op
    ranks, frame = cause.ranks, absence.doing.frame
    subject = ranks_phrase(ranks)
    they_wait = ranks_and_verb(absence.waiting, "waits", "wait")
    waited = context.longest_wait(absence.waiting)
    so_far = f", {duration(waited)} so far" if waited else ""
    why = ": the reason is unknown" if cause.activity.unclear else ""
    return Words(
        summary=(
            f"{they_wait} in {op_phrase(op)} for {subject}, which {verb(ranks, 'is', 'are')}"
            f" {_work(context, cause)}{so_far}{why}"
        ),
        explanation=prose(
            f"{phrases.name(context, ranks[0])} {activity_words(absence.doing)};"
            f" {phrases.last(context, ranks[0])}.",
            *waits(context, absence),
            _limit(cause),
        ),
        next_step=(
            f"wait; if {subject} should not take this long, look at {frame_phrase(frame)}"
            if frame is not None
            else "wait"
        ),
        evidence=signs(absence),
        would_raise_confidence=_doubt(cause),
    )


def _work(context: Context, cause: Working) -> str:
    if cause.activity.unclear:
        work = _NO_WORK.get(cause.why, "sending data that nobody takes")
        return f"{work} and {verb(cause.ranks, 'shows', 'show')} no work"
    if cause.expected:
        block = context.job.views[cause.ranks[0]].log.expecting
        return f"in a block marked as slow ({block})"
    return _WORK.get(cause.why, "working")


def _limit(cause: Working) -> str:
    if not cause.patience_s:
        return ""
    return (
        f"{capital(ranks_and_verb(cause.ranks, 'counts', 'count'))} as stuck if that lasts"
        f" {duration(round(cause.patience_s * 1e9))}."
    )


def _doubt(cause: Working) -> str | None:
    if cause.activity.unclear:
        return "Nothing shows work or a fault: it may wait for a disk or a server."
    if cause.activity.observed:
        return None
    return "It was not watched for long enough to see that it moves."
