"""Put what was found into words: each :class:`Case` becomes a :class:`Finding`. The module of the
cause words it, then what else is known is added: lost nodes, hardware, torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.words import (
    circumstances,
    cycle,
    dead,
    groups_differ,
    hardware,
    messages,
    mismatch,
    missing,
    phrases,
    straggler,
    stuck_inside,
    told_by_errors,
    unrecorded,
    whole_job,
)
from commlens.diagnosis.words.finding import Words, finding_of
from commlens.model.cause import (
    Cause,
    Cycle,
    Dead,
    Ended,
    Fewer,
    GroupsDiffer,
    HelpersAwaited,
    Mismatch,
    Missing,
    Motionless,
    NoSuchPeer,
    Refused,
    Slow,
    StartedTwice,
    StuckInside,
    TakenMessage,
    ToldByErrors,
    Unrecorded,
    Unwritten,
    Working,
)
from commlens.model.verdict import Finding
from commlens.text import duration, ranks_phrase

_WORDS: Mapping[type[Cause], Callable[[Context, Any], Words]] = {
    Cycle: cycle.words,
    Dead: dead.words,
    Ended: dead.words_of_ended,
    Fewer: whole_job.words_of_fewer,
    GroupsDiffer: groups_differ.words,
    HelpersAwaited: missing.words_of_helpers,
    Mismatch: mismatch.words,
    Missing: missing.words,
    Motionless: whole_job.words_of_motionless,
    NoSuchPeer: messages.words_of_no_such_peer,
    Refused: told_by_errors.words_of_refused,
    Slow: straggler.words_of_slow,
    StartedTwice: groups_differ.words_of_started_twice,
    StuckInside: stuck_inside.words,
    TakenMessage: messages.words_of_taken,
    ToldByErrors: told_by_errors.words,
    Unrecorded: unrecorded.words,
    Unwritten: unrecorded.words_of_unwritten,
    Working: missing.words_of_working,
}
"""The function that puts each cause into words."""


def describe_all(context: Context) -> list[Finding]:
    """Return the findings of all cases."""
    findings = [describe(context, case) for case in context.cases]
    _add_refusals(context, findings)
    _add_usual_wait(context, findings)
    return findings


def describe(context: Context, case: Case[Any]) -> Finding:
    """Return the finding of a case."""
    cause = case.cause
    words = circumstances.with_lost_nodes(cause, _WORDS[type(cause)](context, case))
    words = hardware.add_hardware(circumstances.with_init_meeting(words, cause), cause)
    words = phrases.with_compiler(words, cause)
    return finding_of(cause, words, case.op, case.frame)


def _add_usual_wait(context: Context, findings: list[Finding]) -> None:
    """Add to the first finding how long its ranks usually wait there, if the watcher learned it."""
    first = next(iter(findings), None)
    if first is None or first.collective is None:
        return
    waits = [
        usual
        for rank in first.victims
        if rank in context.job.views
        and (usual := context.job.views[rank].log.observation.usual_wait) is not None
    ]
    if waits:
        usual = max(waits, key=lambda each: each.times)
        first.evidence.append(
            f"This {first.collective.op} usually completes in"
            f" {duration(usual.median_s * 1e9)}; the longest of {usual.times} took"
            f" {duration(usual.longest_s * 1e9)}."
        )


def _add_refusals(context: Context, findings: list[Finding]) -> None:
    """Add to the first root cause that nothing was sent, if strict verification raised."""
    refused = [rank for rank, view in sorted(context.job.views.items()) if view.exit.refused]
    cause = next((finding for finding in findings if finding.root_cause), None)
    op = cause.collective if cause is not None else None
    if not refused or cause is None or (op is None and cause.why == "exception"):
        return  # or the cause tells it: a function's call was refused
    known = op is not None and cause.kind.startswith("mismatch/")
    name = (
        f"{op.op} #{op.sequence_number}"
        if op is not None and known
        else "the collective in which the others waited"
    )
    cause.evidence.append(
        f"Strict verification refused {name} before it was issued: {ranks_phrase(refused)} raised"
        " DistributedOperationException."
    )
