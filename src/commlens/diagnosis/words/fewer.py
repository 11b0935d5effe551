"""Words about ranks that issued fewer collectives than the others."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.fewer import FoundFewer
from commlens.diagnosis.words.finding import Words
from commlens.text import capital, count, group_phrase, ranks_phrase


def words(context: Context, found: FoundFewer) -> Words:
    """Return what a finding says about ranks that issued fewer collectives."""
    cause = found.cause
    subject, others = ranks_phrase(cause.ranks), ranks_phrase(cause.others)
    fewer = count(cause.others_issued - cause.issued, "collective")
    group = group_phrase(context.job.channels[found.key].group)
    or_they = "" if cause.culprits else f", or {others} issued one too many"
    return Words(
        summary=(
            f"{subject} issued {fewer} fewer than {'the others' if cause.culprits else others} on"
            f" {group}"
        ),
        explanation=(
            f"{capital(subject)} issued {cause.issued}, the others {cause.others_issued}; all ranks"
            " ended normally. The collectives have the same steps and lines, so the skipped one"
            " cannot be determined."
        ),
        next_step=f"find the iteration in which {subject} skipped one{or_they}",
        would_raise_confidence="Count steps with an optimizer, or issue from different lines.",
    )
