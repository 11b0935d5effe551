"""Compare the records of a running job: find the ranks that disagree or are out of step. Nothing
here is about waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlens.diagnosis.align.alignment import Mismatch, align_records
from commlens.diagnosis.align.swapped_order import SwappedOrder, find_swapped_orders
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.mismatch import find_mismatches
from commlens.diagnosis.graph.build import build_wait_graph
from commlens.diagnosis.index.job_index import JobIndex, index_logs
from commlens.diagnosis.select.job import select_job
from commlens.diagnosis.words.describe import describe
from commlens.diagnosis.words.finding import locate
from commlens.model.collective import ChannelKey, State
from commlens.model.ops import REDUCING
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Finding
from commlens.text import capital, frame_phrase, group_phrase, ranks_phrase

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
    return [
        Disagreement(finding, _is_settled(mismatch))
        for finding, mismatch in found
        if mismatch.answer is not None
    ]


def _is_settled(mismatch: Mismatch) -> bool:
    """Return whether the ranks' records of a mismatch are final: a rank decodes its reduce ops some
    time after it issues them.
    """
    return all(
        not op.in_flight
        and (op.op not in REDUCING or op.is_point_to_point or op.args.reduce_op is not None)
        for op in mismatch.ops.values()
    )


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
    return shifts or [
        _swapped(job, key, swap)
        for key in sorted(job.users)
        for swap in find_swapped_orders(job, key)
    ]


def _swapped(job: JobIndex, key: ChannelKey, swap: SwappedOrder) -> Finding:
    """Make a finding of a swapped order."""
    first, theirs = swap.own[0], swap.others[0]
    last = swap.number + len(swap.own) - 1
    others = [rank for rank in sorted(job.users[key]) if rank != swap.rank]
    where = f"{first.op} #{swap.number} to #{last} of {group_phrase(first.channel.group)}"
    finding = Finding(
        kind="mismatch/op",
        why="in-collective",
        root_cause=True,
        culprits=[swap.rank],
        victims=others,
        confidence="medium",
        summary=(
            f"rank {swap.rank} issued {where} in another order than the others: its collective at"
            f" {frame_phrase(first.source)} met the others' collective at"
            f" {frame_phrase(theirs.source)}"
        ),
        explanation=(
            f"Rank {swap.rank}: {', '.join(frame_phrase(op.source) for op in swap.own[:4])}."
            f" {capital(ranks_phrase(others))}:"
            f" {', '.join(frame_phrase(op.source) for op in swap.others[:4])}. Ops and shapes are"
            " the same, so nothing hangs: the results are mixed up."
        ),
        next_step=f"find out why rank {swap.rank} reaches {frame_phrase(first.source)} first here",
        would_raise_confidence=(
            "Only the source lines show it: the program may issue them in either order on purpose."
        ),
    )
    return locate(finding, first, first.source)


def _index(logs: Sequence[RankLog]) -> JobIndex | None:
    selected, _ = select_job(logs)
    return index_logs(selected, _NOTHING_STALLS_S) if len(selected) > 1 else None


def _mismatches(job: JobIndex) -> list[tuple[Finding, Mismatch]]:
    """Return the mismatches whose order is certain, with their findings, the first cause first."""
    mismatches = [
        mismatch
        for mismatch in align_records(job)
        if not mismatch.uncertain and not _is_with_verifier(mismatch)
    ]
    if not mismatches:
        return []
    context = Context(job, mismatches, build_wait_graph(job, mismatches))
    find_mismatches(context, {})
    cases = sorted(context.cases, key=lambda case: case.order)
    return [(describe(context, case), case.mismatch) for case in cases if case.mismatch is not None]


def _is_with_verifier(mismatch: Mismatch) -> bool:
    """Return whether strict verification still holds these collectives back, or has refused them on
    the ranks that met.
    """
    return mismatch.refused or any(op.state is State.ANNOUNCED for op in mismatch.ops.values())
