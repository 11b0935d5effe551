"""all_to_all: what I send to you must be what you expect from me."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from commlens.matching.answer import Disagree, Party, Severity, Unknown
from commlens.matching.tensors import show_tensors, wire_numel
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.ranks import ranks_phrase


def compare_splits(asked: Mapping[int, CollectiveArgs], group_ranks: Sequence[int]) -> Disagree | Unknown | None:
    """Compare the elements of every pair of ranks. Blamed is who is in most of the pairs that do not fit."""
    size = len(group_ranks)
    sends = {rank: _parts(a.inputs, a.input_splits, size) for rank, a in asked.items()}
    receives = {rank: _parts(a.outputs, a.output_splits, size) for rank, a in asked.items()}
    position = {rank: i for i, rank in enumerate(group_ranks)}
    if not size or any(rank not in position for rank in asked):
        return Unknown(("splits",))
    incomplete = False
    broken: list[tuple[int, int, int, int]] = []
    for sender, parts in sends.items():
        for receiver, expected in receives.items():
            if parts is None or expected is None:
                incomplete = True
            elif parts[position[receiver]] != expected[position[sender]]:
                broken.append((sender, receiver, parts[position[receiver]], expected[position[sender]]))
    if not broken:
        return Unknown(("splits",)) if incomplete else None
    counts = Counter(rank for sender, receiver, _, _ in broken for rank in {sender, receiver})
    most = max(counts.values())
    worst = tuple(sorted(rank for rank, count in counts.items() if count == most))
    minority = worst if len(worst) < len(asked) and len(worst) * 2 < len(asked) else ()
    sender, receiver, sent, expected_count = min(broken, key=lambda pair: (not set(pair[:2]) & set(worst), pair))
    others = tuple(sorted(set(asked) - set(minority)))
    parties = [Party(others, _show(asked[others[0]]))]
    if minority:
        parties.append(Party(minority, _show(asked[minority[0]])))
    detail = f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected_count}"
    if len(broken) > 1:
        detail += f"; {len(broken)} pairs do not fit, {ranks_phrase(worst)} in most of them"
    return Disagree("splits", Severity.ILLEGAL, minority, tuple(parties), detail)


def _parts(specs: Sequence[TensorSpec], splits: Sequence[int], size: int) -> list[int] | None:
    """Elements for each rank of the group; None where it cannot be told. Empty splits are even ones."""
    if not specs or not size:
        return None
    if len(specs) == size and not splits and size > 1:  # the list form
        return [wire_numel(spec) for spec in specs]
    if len(specs) != 1:
        return None
    spec = specs[0]
    elements = wire_numel(spec)
    if not splits:
        return [elements // size] * size if elements % size == 0 else None
    rows = spec.shape[0] if spec.shape else 0
    if len(splits) != size or rows == 0:
        return [0] * size if len(splits) == size and not any(splits) else None
    return [elements // rows * split for split in splits]


def _show(asked: CollectiveArgs) -> str:
    text = show_tensors(asked.inputs)
    return f"{text} in splits {list(asked.input_splits)}" if asked.input_splits else f"{text} in even splits"
