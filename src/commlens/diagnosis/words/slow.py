"""Words about a rank that makes the others wait, in a job that is not stuck."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.slow import FoundSlow
from commlens.diagnosis.words.finding import Words
from commlens.text import count, duration, frame_phrase, group_phrase, op_phrase


def words(context: Context, found: FoundSlow) -> Words:
    """Return what a finding says about a rank that makes the others wait."""
    worst, op = found.lateness, found.op
    group = group_phrase(context.job.channels[worst.key].group)
    before = f" before {frame_phrase(op.source)}" if op.source is not None else ""
    return Words(
        summary=(
            f"nothing is stuck, but rank {worst.rank} is the last to reach the collectives of"
            f" {group}: {worst.times} of {count(worst.of, 'time')},"
            f" {duration(worst.lost_ns // worst.times)} after the others"
        ),
        explanation=(
            f"The others waited {duration(worst.lost_ns)} of {duration(found.span_ns)} for it,"
            f" longest in {op_phrase(op)}. Clocks are corrected by the times at which the ranks"
            " leave their collectives."
        ),
        next_step=f"look at rank {worst.rank}{before}: data loading, a slower GPU or host",
        would_raise_confidence="A profile of that rank would show where its time goes.",
    )
