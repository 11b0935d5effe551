"""The comparison of two runs, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from commlens.model.trace_changes import Change, TraceComparison
from commlens.reports import trace_page
from commlens.text import count, ranks_phrase
from commlens.traces.diff import answer, compare
from commlens.traces.ranks import RankTraces
from commlens.traces.time_changes import add_times


def compare_ranks(before: RankTraces, after: RankTraces) -> TraceComparison:
    """Compare two runs. A change that several ranks share is reported once.

    Two single traces are compared even if their ranks differ. Otherwise, ranks traced in only one
    run are noted.
    """
    if len(before) == len(after) == 1:
        one, other = next(iter(before)).data, next(iter(after)).data
        comparison = compare(one, other)
        add_times(comparison, [one], [other])
        return comparison
    both = [rank for rank in before.ranks if rank in after.by_rank]
    comparison = _combined({rank: compare(before[rank].data, after[rank].data) for rank in both})
    for name, mine, theirs in (("second", after, before), ("first", before, after)):
        if alone := [rank for rank in mine.ranks if rank not in theirs.by_rank]:
            text = f"Not compared: {ranks_phrase(alone)}, traced only in the {name} run."
            comparison.notes.insert(0, text)
    add_times(comparison, [before[rank].data for rank in both], [after[rank].data for rank in both])
    comparison.answer = (
        f"{count(len(both), 'rank')} compared. {answer(comparison)}"
        if both
        else "No rank has a trace in both runs, so nothing was compared."
    )
    return comparison


def _combined(by_rank: Mapping[int, TraceComparison]) -> TraceComparison:
    """Add up the comparisons of several ranks; a change that only some ranks have names these
    ranks.
    """
    comparison = TraceComparison()
    changes: dict[tuple[str, str], Change] = {}
    notes: dict[str, list[int]] = {}
    for rank, one in by_rank.items():
        comparison.per_step = comparison.per_step or one.per_step
        for name in ("calls_before", "calls_after", "wire_bytes_before", "wire_bytes_after"):
            setattr(comparison, name, getattr(comparison, name) + getattr(one, name))
        for change in one.changes:
            changes.setdefault((change.kind, change.sentence), change).ranks.append(rank)
        for note in one.notes:
            notes.setdefault(note, []).append(rank)
    comparison.changes = sorted(
        changes.values(), key=lambda change: (-change.weight * len(change.ranks), change.sentence)
    )
    for change in comparison.changes:
        if len(change.ranks) < len(by_rank):
            change.sentence = f"{ranks_phrase(change.ranks)}: {change.sentence}"
    comparison.notes = [
        note if len(ranks) == len(by_rank) else f"{ranks_phrase(ranks)}: {note}"
        for note, ranks in notes.items()
    ]
    return comparison


def compare_page(
    before: RankTraces, after: RankTraces, comparison: TraceComparison, *, names: tuple[str, str]
) -> bytes:
    """Return the HTML page of a comparison. Of several ranks, it shows the first that changed, or
    the first, side by side.
    """
    one, other = before[before.ranks[0]].data, after[after.ranks[0]].data
    notes = [comparison.time] if comparison.time else []
    both = [rank for rank in before.ranks if rank in after.by_rank]
    if both and not len(before) == len(after) == 1:
        shown = next((change.ranks[0] for change in comparison.changes if change.ranks), both[0])
        one, other = before[shown].data, after[shown].data
        notes.append(
            f"The changes cover {ranks_phrase(both)}; the side-by-side view shows rank {shown}."
        )
        comparison = msgspec.structs.replace(comparison, per_step=compare(one, other).per_step)
    return trace_page.compare_page((one, other), comparison, names=names, notes=notes)
