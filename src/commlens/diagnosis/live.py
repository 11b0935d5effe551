"""Compare the records of a running job: find the ranks that disagree or are out of step, while
nothing hangs yet. Ranks that pass different reduce ops to one all_reduce, for example, get wrong
results and go on. Nothing here is about waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlens.diagnosis.align.alignment import RecordMismatch, align_records
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.mismatch import find_mismatches, find_swapped
from commlens.diagnosis.graph.build import build_wait_graph
from commlens.diagnosis.index.job_index import JobIndex
from commlens.diagnosis.index.log_index import index_logs
from commlens.diagnosis.select.job import select_job
from commlens.diagnosis.words.describe import describe
from commlens.diagnosis.words.finding import finding_of
from commlens.diagnosis.words.mismatch import words_of_swapped
from commlens.model.collective import State
from commlens.model.ops import REDUCING
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Finding

_NOTHING_STALLS_S = 1e6


class Disagreement(NamedTuple):
    """A collective or message that ranks disagree on."""

    finding: Finding
    # it has ended on all ranks, and their reduce ops are known: a later look would find nothing
    # else
    settled: bool


def find_disagreements(logs: Sequence[RankLog]) -> list[Disagreement]:
    """Return the collectives and messages that ranks disagree on, the first cause first.

    Args:
        logs: the boxes of a running job, as of now.
    """
    job = _index(logs)
    found = _mismatches(job) if job is not None else []
    # a rank decodes its reduce ops some time after it issues them
    return [
        Disagreement(
            finding,
            all(
                not op.in_flight
                and (op.op not in REDUCING or op.is_point_to_point or op.args.reduce_op is not None)
                for op in mismatch.ops.values()
            ),
        )
        for finding, mismatch in found
        if mismatch.answer is not None
    ]


def find_out_of_step(logs: Sequence[RankLog], *, at_least: int) -> list[Finding]:
    """Return the ranks out of step, or else with a swapped order, where ops and shapes agree: only
    lines and steps show it.

    Args:
        logs: the boxes of a running job, as of now.
        at_least: later collectives that must match a shift.
    """
    job = _index(logs)
    if job is None:
        return []
    shifts = [
        finding
        for finding, mismatch in _mismatches(job)
        if mismatch.answer is None
        and mismatch.shift is not None
        and mismatch.shift.matches >= at_least
    ]
    return shifts or find_swaps(job)


def find_swaps(job: JobIndex) -> list[Finding]:
    """Return the ranks with a swapped order."""
    return [
        finding_of(case.cause, words_of_swapped(case), case.op, case.frame)
        for key in sorted(job.users)
        for case in find_swapped(job, key)
    ]


def _index(logs: Sequence[RankLog]) -> JobIndex | None:
    selected = select_job(logs).logs
    return index_logs(selected, _NOTHING_STALLS_S) if len(selected) > 1 else None


def _mismatches(job: JobIndex) -> list[tuple[Finding, RecordMismatch]]:
    """Return the mismatches whose order is certain, with their findings, the first cause first."""
    # strict verification still holds them back, or has refused them
    mismatches = [
        mismatch
        for mismatch in align_records(job)
        if not mismatch.uncertain
        and not (
            mismatch.refused or any(op.state is State.ANNOUNCED for op in mismatch.ops.values())
        )
    ]
    if not mismatches:
        return []
    context = Context(job, mismatches, build_wait_graph(job, mismatches))
    find_mismatches(context, {})
    cases = sorted(context.cases, key=lambda case: case.order)
    return [(describe(context, case), case.mismatch) for case in cases if case.mismatch is not None]
