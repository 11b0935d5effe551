"""A rank that makes the others wait again and again, in a job that is not stuck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import Slow
from commlens.model.collective import Collective
from commlens.model.ops import ROOTED

if TYPE_CHECKING:  # it needs numpy, which the diagnosis of black boxes does without
    from commlens.diagnosis.align.lateness import Lateness

# collectives to which a straggler comes last; on a busy machine, each rank does so now and then
_MIN_TIMES = 8
_MIN_SHARE = 0.1  # share of the time for which the others wait for a straggler
_MIN_RATIO = 3.0  # how much longer they wait for it than for any other rank


@dataclass
class FoundSlow:
    """A rank that makes the others wait, and the evidence."""

    cause: Slow
    lateness: Lateness
    span_ns: int
    op: Collective  # to which it came latest


def find_slow(context: Context) -> None:
    """Find the rank that makes the others wait for a good part of the time, if there is one."""
    from commlens.diagnosis.align.lateness import lateness

    job = context.job
    lost: dict[int, Lateness] = {}
    for one in lateness(job):
        lost.setdefault(one.rank, one)
    ranked = sorted(lost.values(), key=lambda one: -one.lost_ns)
    if not ranked:
        return
    worst, second = ranked[0], ranked[1].lost_ns if len(ranked) > 1 else 0
    span = _span_ns(job)
    if (
        worst.times < _MIN_TIMES
        or worst.lost_ns < _MIN_SHARE * span
        or worst.lost_ns < _MIN_RATIO * second
    ):
        return
    op = job.views[worst.rank].tracks[worst.key].ops[worst.worst]
    if op.op in ROOTED:
        return
    cause = Slow(
        kind="straggler",
        why="user-code",
        root_cause=True,
        culprits=[worst.rank],
        blamed_by="lateness",
        victims=sorted(set(worst.key[2]) - {worst.rank}),
        confidence="medium",
        times=worst.times,
        of=worst.of,
        lost_s=worst.lost_ns / 1e9,
        span_s=span / 1e9,
    )
    context.add(FoundSlow(cause, worst, span, op), op, op.source)


def _span_ns(job: JobIndex) -> int:
    """Return the longest time that the records of a rank cover."""
    spans = [0]
    for view in job.views.values():
        created = view.columns.dump.created_ns if view.columns is not None else None
        if created is not None and (created > 0).any():
            spans.append(int(created.max() - created[created > 0].min()))
    return max(spans)
