"""Put what was found into words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commlens.diagnosis.causes.any_source import FoundTakenMessage
from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.cycle import FoundCycle, FoundDeparture
from commlens.diagnosis.causes.dead import FoundDead
from commlens.diagnosis.causes.ended import FoundEnded
from commlens.diagnosis.causes.fewer import FoundFewer
from commlens.diagnosis.causes.groups_differ import FoundGroupsDiffer
from commlens.diagnosis.causes.mismatch import FoundMismatch, FoundRace
from commlens.diagnosis.causes.missing import FoundMissing, FoundWorking
from commlens.diagnosis.causes.motionless import FoundMotionless
from commlens.diagnosis.causes.no_such_peer import FoundNoSuchPeer
from commlens.diagnosis.causes.refused import FoundRefused
from commlens.diagnosis.causes.slow import FoundSlow
from commlens.diagnosis.causes.started_twice import FoundStartedTwice
from commlens.diagnosis.causes.stuck_inside import FoundStuckGroups, FoundStuckInside
from commlens.diagnosis.causes.told_by_errors import FoundInErrors
from commlens.diagnosis.causes.unrecorded import FoundUnrecorded
from commlens.diagnosis.causes.unwritten import FoundUnwritten
from commlens.diagnosis.words import (
    any_source,
    cycle,
    dead,
    ended,
    fewer,
    groups_differ,
    hardware,
    mismatch,
    missing,
    motionless,
    no_such_peer,
    refused,
    slow,
    started_twice,
    stuck_inside,
    told_by_errors,
    unrecorded,
    unwritten,
    working,
)
from commlens.diagnosis.words.finding import Words, finding_of, locate
from commlens.diagnosis.words.lost_nodes import with_lost_nodes
from commlens.model.verdict import Finding
from commlens.text import duration, ranks_phrase

_WORDS: Mapping[type, Callable[[Context, Any], Words]] = {
    FoundCycle: cycle.words,
    FoundDead: dead.words,
    FoundDeparture: cycle.words_of_departure,
    FoundEnded: ended.words,
    FoundFewer: fewer.words,
    FoundGroupsDiffer: groups_differ.words,
    FoundInErrors: told_by_errors.words,
    FoundMismatch: mismatch.words,
    FoundMissing: missing.words,
    FoundMotionless: lambda _, found: motionless.words(found),
    FoundNoSuchPeer: no_such_peer.words,
    FoundRace: mismatch.words_of_race,
    FoundRefused: refused.words,
    FoundSlow: slow.words,
    FoundStartedTwice: lambda _, found: started_twice.words(found),
    FoundStuckGroups: stuck_inside.words_of_groups,
    FoundStuckInside: stuck_inside.words,
    FoundTakenMessage: any_source.words,
    FoundUnrecorded: unrecorded.words,
    FoundUnwritten: unwritten.words,
    FoundWorking: working.words,
}
"""The function that puts each kind of what was found into words."""


def describe_all(context: Context) -> list[Finding]:
    """Return the findings of all cases."""
    findings = [describe(context, case) for case in context.cases]
    _add_refusals(context, findings)
    _add_usual_wait(context, findings)
    return findings


def describe(context: Context, case: Case) -> Finding:
    """Return the finding of a case."""
    cause = case.found.cause
    words = with_lost_nodes(cause, _WORDS[type(case.found)](context, case.found))
    words = hardware.add_hardware(words, cause)
    return locate(finding_of(cause, words), case.op, case.frame)


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
