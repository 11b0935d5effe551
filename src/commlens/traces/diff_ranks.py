"""Two runs of several ranks, compared rank by rank."""

from __future__ import annotations

from commlens.model.trace_changes import Change, Comparison
from commlens.text import ranks_phrase
from commlens.traces.diff import answer, compare
from commlens.traces.ranks import RankTraces


def compare_ranks(before: RankTraces, after: RankTraces) -> Comparison:
    """Say how a run differs from another. What changed alike on several ranks is said once.

    One rank against one rank is compared whatever their numbers are; else ranks that only one run has a trace of are noted.
    """
    if len(before) == len(after) == 1:
        return compare(next(iter(before)).data, next(iter(after)).data)
    both = [rank for rank in before.ranks if rank in after.by_rank]
    comparison = Comparison()
    changes: dict[tuple[str, str], Change] = {}
    notes: dict[str, list[int]] = {}
    for rank in both:
        one = compare(before[rank].data, after[rank].data)
        comparison.per_step = comparison.per_step or one.per_step
        for name in ("calls_before", "calls_after", "wire_bytes_before", "wire_bytes_after"):
            setattr(comparison, name, getattr(comparison, name) + getattr(one, name))
        for change in one.changes:
            changes.setdefault((change.kind, change.sentence), change).ranks.append(rank)
        for note in one.notes:
            notes.setdefault(note, []).append(rank)
    comparison.changes = sorted(changes.values(), key=lambda change: (-change.weight * len(change.ranks), change.sentence))
    for change in comparison.changes:
        if len(change.ranks) < len(both):
            change.sentence = f"{ranks_phrase(change.ranks)}: {change.sentence}"
    for name, mine, theirs in (("first", before, after), ("second", after, before)):
        alone = [rank for rank in mine.ranks if rank not in theirs.by_rank]
        if alone:
            comparison.notes.append(f"Only the {name} has a trace of {ranks_phrase(alone)}: not compared.")
    for note, ranks in notes.items():
        comparison.notes.append(note if len(ranks) == len(both) else f"{ranks_phrase(ranks)}: {note}")
    comparison.answer = answer(comparison) if both else "No rank has a trace in both: nothing was compared."
    if both:
        comparison.answer = f"{len(both)} ranks together. {comparison.answer}"
    return comparison
