"""Words about ranks that wait, where no record shows for which ranks."""

from __future__ import annotations

from commlens.diagnosis.causes.unexplained import FoundUnexplained
from commlens.diagnosis.words.finding import Words
from commlens.text import op_phrase, ranks_and_verb, verb

_SHOWN = 3  # collectives


def words(found: FoundUnexplained) -> Words:
    """Return what a finding says about ranks whose waits are unexplained."""
    return Words(
        summary=_summary(found),
        next_step="check that these are dumps of one job, and of one moment",
        would_raise_confidence="Nothing in these records shows for which rank they wait.",
    )


def _summary(found: FoundUnexplained) -> str:
    ranks = found.cause.ranks
    they_wait = ranks_and_verb(ranks, "waits", "wait")
    if found.cause.too_many_waits:
        return f"{they_wait} in too many different collectives to find the cause"
    names = list(dict.fromkeys(op_phrase(op) for op in found.ops))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{they_wait} in {', '.join(names[:_SHOWN])}{more}; the ranks that"
        f" {verb(ranks, 'it waits', 'they wait')} for are unknown"
    )
