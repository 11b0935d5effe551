"""Words about processes that ended, not because a peer had."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.dead import FoundDead
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.exits import exit_words
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import death_step
from commlens.diagnosis.words.phrases import prose
from commlens.matching.known_errors import is_kernel_error
from commlens.model.cause import DeathDoubt
from commlens.text import capital, frame_phrase, ranks_phrase, verb

_SHOWN = 4
_SYSTEM_LOG = (
    "The system's log (dmesg, the scheduler) may show how it ended; `commlens launch` records it."
)
_WOULD_RAISE: dict[DeathDoubt, str] = {
    "perhaps-aborted": "No line tells how it ended; the records of `commlens launch` do.",
    "first-unknown": _SYSTEM_LOG,
    "unobserved": _SYSTEM_LOG,
}


def words(context: Context, found: FoundDead) -> Words:
    """Return what a finding says about processes that ended."""
    cause, views = found.cause, context.job.views
    ranks, peers = cause.ranks, cause.ended_by_it
    view = views[ranks[0]]
    waiting = sorted({edge.rank for edge in found.edges})
    exits = [views[rank].exit for rank in peers]
    others = [
        rank for rank, end in zip(peers, exits, strict=True) if not (end.refused or end.gave_up)
    ]
    waits = _waits(context, found)
    undecided = cause.doubt in ("first-unknown", "perhaps-aborted")
    return Words(
        summary=f"{_summary(context, found)}; {waits}" if waits else _summary(context, found),
        explanation=prose(
            f"{phrases.name(context, ranks[0])}:"
            f" {phrases.last(context, ranks[0])}{_last_seen(context, found)}.",
            phrases.waiting(context, found.edges) if found.edges else "",
            phrases.waiting_behind(context, waiting, set(found.blocked) - set(ranks)),
            f"{capital(ranks_phrase(peers))} ended because of it." if peers else "",
        ),
        next_step=(
            f"look at the output of {ranks_phrase(ranks)}"
            if undecided
            else death_step(view, found.frame)
        ),
        evidence=[
            *_assertion(view),
            *(f"rank {rank} {exit_words(views[rank].exit)}." for rank in others),
            *phrases.aborted(context, peers),
        ][:_SHOWN],
        would_raise_confidence=_WOULD_RAISE[cause.doubt] if cause.doubt is not None else None,
        waits=waits,
        finds_kernel=not undecided and is_kernel_error(view.log.exception),
    )


def _summary(context: Context, found: FoundDead) -> str:
    views, ranks, doubt = context.job.views, found.cause.ranks, found.cause.doubt
    end = views[ranks[0]].exit
    summary = f"{ranks_phrase(ranks)} {exit_words(end, ranks)}"
    if doubt == "perhaps-aborted":
        summary += (
            "; no line tells whether of an error, or because NCCL's watchdog gave up waiting for"
            " another rank"
        )
    if len({views[rank].exit.error for rank in ranks}) > 1:
        summary += f" (on rank {ranks[0]}; the same on the others, but for numbers)"
    if end.source is not None:
        summary += f" at {frame_phrase(end.source)}"
    return summary


def _assertion(view: RankView) -> list[str]:
    """Return the assertion that failed in a kernel, if the rank ended with its error."""
    assertion = view.log.device_assertion
    if not assertion or view.exit.why != "exception":
        return []
    return [f"An assertion failed in a kernel of rank {view.rank}: {assertion}."]


def _waits(context: Context, found: FoundDead) -> str:
    ranks, awaited = found.cause.ranks, found.awaited
    if not found.edges:
        return ""
    them = verb(ranks, "it", "them") if awaited == ranks else ranks_phrase(awaited)
    return phrases.waits(
        context, found.edges, f"was waiting for {them}", f"were waiting for {them}"
    )


def _last_seen(context: Context, found: FoundDead) -> str:
    raised = context.job.views[found.cause.ranks[0]].exit.source is not None
    if found.frame is None or raised:
        return ""
    did = "issued" if found.is_last_op else "last seen"
    return f"; it was {did} at {frame_phrase(found.frame)}"
