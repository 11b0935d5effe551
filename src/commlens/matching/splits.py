"""Compare the splits of an all_to_all: each rank must send to each other rank as much as that rank
expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from commlens.matching.answer import Disagree, Party, Severity, Unknown
from commlens.matching.tensors import total, wire_numel
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.ops import splits_fit, tells_totals
from commlens.text import rank_phrase, ranks_phrase, tensors_phrase

_SHOWN = 8  # ranks with their numbers of elements


def compare_splits(
    by_rank: Mapping[int, CollectiveArgs], group_ranks: Sequence[int]
) -> Disagree | Unknown | None:
    """Compare the elements sent and expected for every pair of ranks. Blame the ranks involved in
    the most mismatched pairs.
    """
    size = len(group_ranks)
    position = {rank: i for i, rank in enumerate(group_ranks)}
    if not size or not by_rank.keys() <= position.keys():
        return Unknown(("splits",))
    refused = tuple(sorted(rank for rank, args in by_rank.items() if not _fit(args, size)))
    if len(refused) == len(by_rank):
        return None  # nothing was sent
    if refused:
        return _refused(by_rank, refused)
    sends = {rank: _parts(a.inputs, a.input_splits, size) for rank, a in by_rank.items()}
    receives = {rank: _parts(a.outputs, a.output_splits, size) for rank, a in by_rank.items()}
    broken = _mismatched_pairs(sends, receives, position)
    if broken:
        return _broken(by_rank, broken)
    return Unknown(("splits",)) if None in (*sends.values(), *receives.values()) else None


_Parts = Mapping[int, list[int] | None]
"""By rank, the elements for each rank of the group; None if unknown."""


def _mismatched_pairs(
    sends: _Parts, receives: _Parts, position: Mapping[int, int]
) -> list[tuple[int, int, int, int]]:
    """Return senders and receivers with the numbers of elements that these send and expect, where
    both are known and differ.
    """
    return [
        (sender, receiver, parts[position[receiver]], expected[position[sender]])
        for sender, parts in sends.items()
        for receiver, expected in receives.items()
        if parts and expected and parts[position[receiver]] != expected[position[sender]]
    ]


def _refused(by_rank: Mapping[int, CollectiveArgs], refused: tuple[int, ...]) -> Disagree:
    """Return the ranks whose own splits and tensors do not fit each other."""
    valid = tuple(sorted(set(by_rank) - set(refused)))
    sides = tuple(Party(ranks, _show_all(by_rank, ranks)) for ranks in (valid, refused))
    detail = (
        f"the splits of {ranks_phrase(refused)} do not fit"
        f" {'its' if len(refused) == 1 else 'their'} own tensors"
    )
    return Disagree("splits", Severity.ILLEGAL, refused, sides, detail, in_itself=True)


def _broken(
    by_rank: Mapping[int, CollectiveArgs], broken: Sequence[tuple[int, int, int, int]]
) -> Disagree:
    """Blame the ranks that most of the mismatched pairs have in common.

    Args:
        by_rank: the arguments.
        broken: the mismatched pairs: sender, receiver, and the different numbers of elements that
            these send and expect.
    """
    counts = Counter(rank for sender, receiver, _, _ in broken for rank in {sender, receiver})
    most = max(counts.values())
    worst = {rank for rank, times in counts.items() if times == most}
    minority = tuple(sorted(worst)) if len(worst) * 2 < len(by_rank) else ()
    sender, receiver, sent, expected = min(
        broken, key=lambda pair: (worst.isdisjoint(pair[:2]), pair)
    )
    others = tuple(sorted(set(by_rank) - set(minority)))
    parties = [Party(ranks, _show_all(by_rank, ranks)) for ranks in (others, minority) if ranks]
    detail = (
        f"{rank_phrase(sender)} sends {sent} elements to {rank_phrase(receiver)}, which"
        f" expects {expected}"
    )
    if len(broken) > 1:
        detail += f"; {len(broken)} mismatched pairs, {ranks_phrase(worst)} in most of them"
    return Disagree("splits", Severity.ILLEGAL, minority, tuple(parties), detail)


def _show_all(by_rank: Mapping[int, CollectiveArgs], ranks: Sequence[int]) -> str:
    """Return the argument that all these ranks pass, if it is the same."""
    shown = {_show(by_rank[rank]) for rank in ranks}
    return shown.pop() if len(shown) == 1 else "different splits"


def compare_totals(
    by_rank: Mapping[int, CollectiveArgs], group_ranks: Sequence[int]
) -> Disagree | Unknown:
    """Compare the elements that all ranks together send and expect, where a source does not record
    the splits.

    If the totals differ, no splits fit; they do not show whose are wrong. If they are equal, the
    splits may still not fit.
    """
    complete = bool(group_ranks) and set(group_ranks) <= set(by_rank)
    if not complete or not all(
        args.inputs and args.outputs and tells_totals(args.dispatcher_op)
        for args in by_rank.values()
    ):
        return Unknown(("splits",))
    totals = {
        rank: (total(args.inputs), total(args.outputs)) for rank, args in sorted(by_rank.items())
    }
    sent, expected = (sum(each) for each in zip(*totals.values(), strict=True))
    if sent == expected:
        return Unknown(("splits",))
    uneven = [
        f"{rank_phrase(rank)} sends {out} and expects {into}"
        for rank, (out, into) in totals.items()
        if out != into
    ]
    more = (
        [f"{len(uneven) - _SHOWN} more ranks send and expect different numbers"]
        if len(uneven) > _SHOWN
        else []
    )
    phrase = f"together, they send {sent} elements and expect {expected}"
    return Disagree(
        "splits",
        Severity.ILLEGAL,
        (),
        (Party(tuple(totals), phrase),),
        "; ".join([*uneven[:_SHOWN], *more]),
    )


def _fit(args: CollectiveArgs, size: int) -> bool:
    """Return whether a rank's own splits and tensors fit each other, as gloo and NCCL check before
    they send.
    """
    if len(args.inputs) != 1 or len(args.outputs) != 1:
        return True  # the list form
    if not args.input_splits and not args.output_splits:
        return wire_numel(args.inputs[0]) == wire_numel(args.outputs[0])
    pairs = ((args.inputs[0], args.input_splits), (args.outputs[0], args.output_splits))
    return all(
        splits_fit(spec.shape[0] if spec.shape else 0, splits, size) for spec, splits in pairs
    )


def _parts(specs: Sequence[TensorSpec], splits: Sequence[int], size: int) -> list[int] | None:
    """Return the number of elements for each rank of the group; None if unknown. Empty splits mean
    even splits.
    """
    if not size:
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


def _show(args: CollectiveArgs) -> str:
    text = tensors_phrase(args.inputs)
    return (
        f"{text} with {f'splits {list(args.input_splits)}' if args.input_splits else 'even splits'}"
    )
