"""Compare the ranks' arguments of one collective.

The rules, per wire op, follow c10d's documentation and what gloo and NCCL do with each disagreement
(torch 2.6 to 2.15): an illegal one hangs, aborts or corrupts data; a suspicious one runs, but its
result is probably not the intended one. For example, of an all_reduce::

    rank 0    float32[2,8], sum
    rank 1    float32[4,4], sum     another shape of as many elements, which is suspicious
    rank 2    float32[2,8], avg     another reduce op, likewise
    rank 3    float32[2,9], sum     another number of elements, which is illegal

ranks 0 to 3 together disagree in the "shape", illegally; rank 3 is the minority. An aspect is
compared by a vote: the largest side of ranks with equal values is taken for right, if it is more
than half of them. A rank whose value is unknown abstains, and the answer is unknown if the others
agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from commlens.matching.answer import Agree, Answer, Aspect, Disagree, Party, Severity, Unknown
from commlens.matching.tensors import is_sparse, squeezed, total, wire_dtype, wire_numel
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.grouping import grouped
from commlens.model.ops import (
    REDUCING,
    ROOTED,
    ROUTED,
    UNEVEN,
    UNKNOWN_DTYPE,
    WITHOUT_TENSORS,
    splits_fit,
    tells_totals,
)
from commlens.text import rank_phrase, ranks_phrase, tensors_phrase


def compare_collectives(
    by_rank: Mapping[int, CollectiveArgs],
    group_ranks: Sequence[int] = (),
    *,
    splits_known: bool = True,
) -> Answer:
    """Compare the arguments of one collective, by global rank. Of several disagreements, return
    the first illegal one, else the first suspicious one.

    Args:
        by_rank: the arguments.
        group_ranks: the group's global ranks in group order. Without them, all_to_all and uneven
            lists cannot be compared.
        splits_known: whether the source tells splits. Without them, the sizes of uneven collectives
            may legally differ.
    """
    if len(by_rank) < 2:
        return Agree()
    # the other aspects have rules for each op
    answer = _vote("op", by_rank, lambda a: a.op, lambda a: a.op)
    if answer is not None:
        return answer
    op = next(iter(by_rank.values())).op
    if op in WITHOUT_TENSORS:
        return Agree()
    if op in UNEVEN and not splits_known:
        return (
            compare_totals(by_rank, group_ranks)
            if op == "all_to_all"
            else Unknown(("root", "shape"))
        )
    unknown: list[str] = []
    suspicious: Disagree | None = None
    for compare in _ASPECTS:
        found = compare(op, by_rank, group_ranks)
        if isinstance(found, Unknown):
            unknown += found.aspects
        elif isinstance(found, Disagree):
            if found.severity is Severity.ILLEGAL:
                return found
            suspicious = suspicious or found
    if suspicious is not None:
        return suspicious
    return Unknown(tuple(dict.fromkeys(unknown))) if unknown else Agree()


def compare_coalesced(
    members: Mapping[int, Sequence[CollectiveArgs]],
    group_ranks: Sequence[int] = (),
    *,
    splits_known: bool = True,
) -> Answer:
    """Compare coalesced collectives: their members must agree one by one, in order. A plain
    collective is a group of one.
    """
    lengths = {rank: len(group) for rank, group in members.items()}
    if len(set(lengths.values())) > 1:
        ops = {rank: tuple(args.op for args in group) for rank, group in members.items()}
        return _disagree("op", Severity.ILLEGAL, ops, lambda value: " + ".join(value))
    unknown: set[str] = set()
    for position in range(min(lengths.values(), default=0)):
        args = {rank: group[position] for rank, group in members.items()}
        answer = compare_collectives(args, group_ranks, splits_known=splits_known)
        if isinstance(answer, Disagree):
            return answer
        if isinstance(answer, Unknown):
            unknown.update(answer.aspects)
    return Unknown(tuple(sorted(unknown))) if unknown else Agree()


# --- the aspects: each function returns None if the ranks agree, or if the op does not have it


def _elements(
    op: str, by_rank: Mapping[int, CollectiveArgs], group_ranks: Sequence[int]
) -> Answer | None:
    """Compare the number of elements that each rank puts on the wire."""
    if op in ROUTED:
        return None
    if op == "all_to_all":
        return compare_splits(by_rank, group_ranks)
    if op == "all_gather" and _uneven_lists_match(by_rank, group_ranks):
        return None
    return _vote("shape", by_rank, _wire_sizes, lambda a: tensors_phrase(a.payload))


def _wire_sizes(args: CollectiveArgs) -> Hashable | None:
    """Return how much a rank puts on the wire, in a form that is equal for ranks that match."""
    specs = args.payload
    if not specs:
        return None
    if any(is_sparse(spec) for spec in specs):
        return tuple(spec.shape for spec in specs)
    # A list of tensors and one tensor match on the wire (reduce_scatter and reduce_scatter_tensor,
    # a list and its concatenation): only the totals must be equal.
    return total(specs)


def _uneven_lists_match(by_rank: Mapping[int, CollectiveArgs], group_ranks: Sequence[int]) -> bool:
    """Return whether every rank's output list has the sizes of the uneven inputs: output i is rank
    i's input, legal on NCCL.
    """
    position = {rank: i for i, rank in enumerate(group_ranks)}
    sent = {
        position[rank]: total(a.inputs)
        for rank, a in by_rank.items()
        if rank in position and a.inputs
    }
    if len(set(sent.values())) < 2:
        return False
    for a in by_rank.values():
        if len(a.outputs) != len(group_ranks):
            return False
        if any(wire_numel(a.outputs[i]) != count for i, count in sent.items()):
            return False
    return True


def _dtype(op: str, by_rank: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    def dtypes(a: CollectiveArgs) -> Hashable | None:
        known = _property(a, wire_dtype)
        return None if known is None or UNKNOWN_DTYPE in known else known

    return _vote("dtype", by_rank, dtypes, lambda a: tensors_phrase(a.payload))


def _shape(op: str, by_rank: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    """Compare shapes: the same number of elements in a different shape runs but scrambles them.
    Flat views and dimensions of 1 are fine.
    """
    sizes = {_sizes(a) for a in by_rank.values()}
    counts = {len(each) for each in sizes}
    if op != "all_to_all" and len(counts) == 1 and counts.pop() > 1 and len(sizes) > 1:
        # Equal numbers of tensors and of elements in all, but different sizes: coalesced tensors in
        # a different order.
        return _vote(
            "shape", by_rank, _sizes, lambda a: tensors_phrase(a.payload), Severity.SUSPICIOUS
        )
    if op not in ("all_reduce", "broadcast", "reduce"):
        return None
    shaped = {
        rank: a
        for rank, a in by_rank.items()
        if any(len(shape) > 1 for shape in _squeezed_shapes(a))
    }
    if len({_squeezed_shapes(a) for a in shaped.values()}) < 2:
        return None
    return _vote(
        "shape", shaped, _squeezed_shapes, lambda a: tensors_phrase(a.payload), Severity.SUSPICIOUS
    )


def _memory_order(
    op: str, by_rank: Mapping[int, CollectiveArgs], _: Sequence[int]
) -> Answer | None:
    """Compare memory order: the wire carries raw memory, so tensors of equal shape but different
    memory order are silently scrambled.
    """

    def order(a: CollectiveArgs) -> Hashable | None:
        specs = a.payload
        return (
            tuple((spec.shape, spec.memory_order) for spec in specs if not is_sparse(spec))
            if specs
            else None
        )

    if len({tuple(spec.shape for spec in a.payload) for a in by_rank.values() if a.payload}) > 1:
        # the shapes differ, which is reported already, or one is a flat view, whose order is
        # unknown
        return None
    return _vote("layout", by_rank, order, lambda a: tensors_phrase(a.payload), Severity.SUSPICIOUS)


def _sizes(args: CollectiveArgs) -> tuple[int, ...]:
    """Return the number of elements of each tensor."""
    return tuple(wire_numel(spec) for spec in args.payload)


def _squeezed_shapes(args: CollectiveArgs) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each tensor without dimensions of 1."""
    return tuple(squeezed(spec) for spec in args.payload)


_Compare = Callable[[str, Mapping[int, CollectiveArgs], Sequence[int]], Answer | None]
_ASPECTS: tuple[_Compare, ...] = (
    lambda op, by_rank, _: (
        _vote("root", by_rank, lambda a: a.root, lambda a: f"root {a.root}")
        if op in ROOTED
        else None
    ),
    lambda op, by_rank, _: _vote(
        "layout",
        by_rank,
        lambda a: _property(a, lambda spec: spec.layout),
        lambda a: tensors_phrase(a.payload),
    ),
    _elements,
    _dtype,
    lambda op, by_rank, _: _vote(
        "device",
        by_rank,
        lambda a: _property(a, lambda spec: spec.device),
        lambda a: f"a tensor on {a.payload[0].device}",
    ),
    lambda op, by_rank, _: (
        _vote(
            "reduce-op",
            by_rank,
            lambda a: a.reduce_op,
            lambda a: str(a.reduce_op),
            Severity.SUSPICIOUS,
        )
        if op in REDUCING
        else None
    ),
    _shape,
    _memory_order,
)


# --- voting


def _property(args: CollectiveArgs, read: Callable[[TensorSpec], str]) -> frozenset[str] | None:
    """Return the values of one property over all of a rank's tensors, as a set: a list and one
    tensor may match on the wire.
    """
    specs = args.payload
    return frozenset(read(spec) for spec in specs) if specs else None


def _vote(
    aspect: Aspect,
    by_rank: Mapping[int, CollectiveArgs],
    read: Callable[[CollectiveArgs], Hashable | None],
    show: Callable[[CollectiveArgs], str],
    severity: Severity = Severity.ILLEGAL,
) -> Disagree | Unknown | None:
    """Compare one value of each rank; ranks without a value abstain.

    Args:
        aspect: the name of what is compared.
        by_rank: the arguments.
        read: returns a rank's value, which is equal where ranks match; None: unknown.
        show: returns it in words.
        severity: of a disagreement.
    """
    values = {rank: value for rank, a in by_rank.items() if (value := read(a)) is not None}
    if len(set(values.values())) < 2:
        return Unknown((aspect,)) if len(values) < len(by_rank) else None
    # in the wording of the first rank of each side
    shown = {values[rank]: show(by_rank[rank]) for rank in sorted(values, reverse=True)}
    return _disagree(aspect, severity, values, lambda value: shown[value])


def _disagree(
    aspect: Aspect, severity: Severity, values: Mapping[int, Hashable], show: Callable[..., str]
) -> Disagree:
    """Return the parties of a disagreement, the largest first. The others are the minority, if the
    largest holds most of the ranks.
    """
    sides = grouped((values[rank], rank) for rank in sorted(values))
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
    parties = tuple(Party(tuple(ranks), show(value)) for value, ranks in ordered)
    tie = len(ordered[0][1]) * 2 <= len(values)
    minority = () if tie else tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
    return Disagree(
        aspect,
        severity,
        minority,
        parties,
        "; ".join(f"{ranks_phrase(p.ranks)}: {p.phrase}" for p in parties),
    )


# --- the splits of an all_to_all: each rank must send to each other rank as much as that rank
# expects

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
        return None  # each rank's own backend refuses the call: nothing was sent
    if refused:
        return _refused(by_rank, refused)
    sends = {rank: _parts(a.inputs, a.input_splits, size) for rank, a in by_rank.items()}
    receives = {rank: _parts(a.outputs, a.output_splits, size) for rank, a in by_rank.items()}
    broken = _mismatched_pairs(sends, receives, position)
    if broken:
        return _broken(by_rank, broken)
    return Unknown(("splits",)) if None in (*sends.values(), *receives.values()) else None


def _mismatched_pairs(
    sends: Mapping[int, list[int] | None],
    receives: Mapping[int, list[int] | None],
    position: Mapping[int, int],
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
    # the pair to show: one with a rank that is blamed
    sender, receiver, sent, expected = min(
        broken, key=lambda pair: (worst.isdisjoint(pair[:2]), pair)
    )
    others = tuple(sorted(set(by_rank) - set(minority)))
    sides: Sequence[tuple[int, ...]] = (others, minority)
    if not minority and sender != receiver:  # of one pair, either may be wrong
        rest = tuple(rank for rank in others if rank not in (sender, receiver))
        sides = ((sender,), (receiver,), rest)
    parties = [Party(ranks, _show_all(by_rank, ranks)) for ranks in sides if ranks]
    detail = (
        f"{rank_phrase(sender)} sends {sent} elements to {rank_phrase(receiver)}, which"
        f" expects {expected}"
    )
    if len(broken) > 1:
        detail += f"; {len(broken)} mismatched pairs, {ranks_phrase(worst)} in most of them"
    return Disagree("splits", Severity.ILLEGAL, minority, tuple(parties), detail)


def _show_all(by_rank: Mapping[int, CollectiveArgs], ranks: Sequence[int]) -> str:
    """Return the input and the splits that all these ranks pass, if they are the same."""
    passed = {
        (tensors_phrase(by_rank[rank].inputs), tuple(by_rank[rank].input_splits)) for rank in ranks
    }
    if len(passed) != 1:
        return "different splits"
    ((tensors, splits),) = passed
    return f"{tensors} with {f'splits {list(splits)}' if splits else 'even splits'}"


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
