"""Compare what the ranks of one collective asked for.

The rules, per wire op, follow c10d's documentation and what gloo and NCCL do with each disagreement (torch 2.6 to 2.15):
an illegal one hangs, aborts or corrupts; a suspicious one runs and gives a result that is probably not meant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from commlens.matching.answer import Agree, Answer, Aspect, Disagree, Party, Severity, Unknown
from commlens.matching.splits import compare_splits
from commlens.matching.tensors import is_sparse, payload, show_tensors, squeezed, total, wire_dtype, wire_numel
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.ops import REDUCING, ROOTED
from commlens.model.ranks import ranks_phrase

_BARRIERS = frozenset({"barrier", "monitored_barrier"})


def compare_collectives(asked: Mapping[int, CollectiveArgs], group_ranks: Sequence[int] = ()) -> Answer:
    """Compare one collective's records, one for each rank that has one.

    Args:
        asked: what each (global) rank asked for.
        group_ranks: the group's global ranks in group order; all_to_all and uneven lists cannot be compared without them.
    """
    if len(asked) < 2:
        return Agree()
    answer = _vote("op", asked, lambda a: a.op, lambda a: a.op)
    if answer is not None:
        return answer
    op = next(iter(asked.values())).op
    if op in _BARRIERS:
        return Agree()
    unknown: list[str] = []
    later: Disagree | None = None
    for aspect, compare in _ASPECTS:
        found = compare(op, asked, group_ranks)
        if isinstance(found, Unknown):
            unknown.append(aspect)
        elif isinstance(found, Disagree):
            if found.severity is Severity.ILLEGAL:
                return found
            later = later or found
    if later is not None:
        return later
    return Unknown(tuple(unknown)) if unknown else Agree()


def compare_coalesced(members: Mapping[int, Sequence[CollectiveArgs]], group_ranks: Sequence[int] = ()) -> Answer:
    """Compare coalesced groups: their members must agree one by one, in order. A plain collective is a group of one."""
    lengths = {rank: len(group) for rank, group in members.items()}
    ops = {rank: tuple(asked.op for asked in group) for rank, group in members.items()}
    if len(set(lengths.values())) > 1:
        return _split("op", Severity.ILLEGAL, ops, lambda value: " + ".join(value))
    unknown: set[str] = set()
    for position in range(min(lengths.values(), default=0)):
        answer = compare_collectives({rank: group[position] for rank, group in members.items()}, group_ranks)
        if isinstance(answer, Disagree):
            return answer
        if isinstance(answer, Unknown):
            unknown.update(answer.aspects)
    return Unknown(tuple(sorted(unknown))) if unknown else Agree()


# --- the aspects -------------------------------------------------------------------------------------------------


def _root(op: str, asked: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    if op not in ROOTED:
        return None
    return _vote("root", asked, lambda a: a.root, lambda a: f"{op} with root {a.root}")


def _reduce_op(op: str, asked: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    if op not in REDUCING:
        return None
    return _vote("reduce-op", asked, lambda a: a.reduce_op, lambda a: str(a.reduce_op), Severity.SUSPICIOUS)


def _elements(op: str, asked: Mapping[int, CollectiveArgs], group_ranks: Sequence[int]) -> Answer | None:
    """How many elements each rank puts on the wire."""
    if op == "all_to_all":
        return compare_splits(asked, group_ranks)
    if op == "all_gather" and _uneven_lists_match(asked, group_ranks):
        return None
    return _vote("shape", asked, lambda a: _wire_sizes(op, a), lambda a: show_tensors(payload(a)))


def _wire_sizes(op: str, asked: CollectiveArgs) -> Hashable | None:
    specs = payload(asked)
    if not specs:
        return None
    if any(is_sparse(spec) for spec in specs):
        return tuple(spec.shape for spec in specs)
    # A list of the group's size and one tensor meet on the wire (reduce_scatter and reduce_scatter_tensor), and so do a list of
    # tensors and their concatenation: only the sum must be equal.
    return total(specs)


def _uneven_lists_match(asked: Mapping[int, CollectiveArgs], group_ranks: Sequence[int]) -> bool:
    """all_gather of uneven tensors into lists is legal (NCCL) where everybody's list says so: output i is rank i's input."""
    position = {rank: i for i, rank in enumerate(group_ranks)}
    sent = {position[rank]: total(a.inputs) for rank, a in asked.items() if rank in position and a.inputs}
    if len(set(sent.values())) < 2:
        return False
    for a in asked.values():
        if len(a.outputs) != len(group_ranks):
            return False
        if any(wire_numel(a.outputs[i]) != count for i, count in sent.items()):
            return False
    return True


def _dtype(op: str, asked: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    return _vote("dtype", asked, lambda a: _over_tensors(a, wire_dtype), lambda a: show_tensors(payload(a)))


def _device(op: str, asked: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    return _vote("device", asked, lambda a: _over_tensors(a, lambda spec: spec.device), lambda a: f"a tensor on {payload(a)[0].device}")


def _sparsity(op: str, asked: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    return _vote("layout", asked, lambda a: _over_tensors(a, lambda spec: spec.layout), lambda a: show_tensors(payload(a)))


def _shape(op: str, asked: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    """Equal numbers of elements in other shapes run, and mix up the elements' meaning. Flat views and dimensions of 1 do not."""
    members = {rank: tuple(wire_numel(spec) for spec in payload(a)) for rank, a in asked.items()}
    counts = {len(sizes) for sizes in members.values()}
    if op != "all_to_all" and len(counts) == 1 and counts.pop() > 1 and len(set(members.values())) > 1:
        # As many tensors and elements in all, cut elsewhere: coalesced ones in another order.
        return _vote(
            "shape",
            asked,
            lambda a: tuple(wire_numel(spec) for spec in payload(a)),
            lambda a: show_tensors(payload(a)),
            Severity.SUSPICIOUS,
        )
    if op not in ("all_reduce", "broadcast", "reduce"):
        return None
    shapes = {rank: tuple(squeezed(spec) for spec in payload(a)) for rank, a in asked.items() if payload(a)}
    real = {rank: shape for rank, shape in shapes.items() if any(len(one) > 1 for one in shape)}
    if len(set(real.values())) < 2:
        return None
    return _vote(
        "shape", {r: asked[r] for r in real}, lambda a: tuple(squeezed(s) for s in payload(a)), lambda a: show_tensors(payload(a)),
        Severity.SUSPICIOUS,
    )  # fmt: skip


def _memory_order(op: str, asked: Mapping[int, CollectiveArgs], _: Sequence[int]) -> Answer | None:
    """The wire carries memory as it lies: equal shapes in another order of dimensions are silently mixed up."""

    def order(a: CollectiveArgs) -> Hashable | None:
        specs = payload(a)
        return tuple((spec.shape, spec.memory_order) for spec in specs if not is_sparse(spec)) if specs else None

    if len({squeezed_shapes(a) for a in asked.values() if payload(a)}) > 1:
        return None  # the shape already says it, or it is a flat view of which nothing can be said
    return _vote("layout", asked, order, lambda a: show_tensors(payload(a)), Severity.SUSPICIOUS)


def squeezed_shapes(asked: CollectiveArgs) -> tuple[tuple[int, ...], ...]:
    """The shapes of a rank's tensors, as they are."""
    return tuple(spec.shape for spec in payload(asked))


_Compare = Callable[[str, Mapping[int, CollectiveArgs], Sequence[int]], Answer | None]
_ASPECTS: tuple[tuple[str, _Compare], ...] = (
    ("root", _root),
    ("layout", _sparsity),
    ("shape", _elements),
    ("dtype", _dtype),
    ("device", _device),
    ("reduce-op", _reduce_op),
    ("shape", _shape),
    ("layout", _memory_order),
)


# --- voting ------------------------------------------------------------------------------------------------------


def _over_tensors(asked: CollectiveArgs, read: Callable[[TensorSpec], str]) -> Hashable | None:
    """What all of a rank's tensors share, as a set: a list of them and one tensor meet on the wire."""
    specs = payload(asked)
    return frozenset(read(spec) for spec in specs) if specs else None


def _vote(
    aspect: Aspect,
    asked: Mapping[int, CollectiveArgs],
    read: Callable[[CollectiveArgs], Hashable | None],
    show: Callable[[CollectiveArgs], str],
    severity: Severity = Severity.ILLEGAL,
) -> Disagree | Unknown | None:
    """Whether all who say something say the same."""
    values = {rank: value for rank, a in asked.items() if (value := read(a)) is not None}
    if len(set(values.values())) < 2:
        return Unknown((aspect,)) if len(values) < len(asked) else None
    shown = {values[rank]: show(asked[rank]) for rank in sorted(values, reverse=True)}  # as the first rank of each side shows it
    return _split(aspect, severity, values, lambda value: shown[value])


def _split(aspect: Aspect, severity: Severity, values: Mapping[int, Hashable], show: Callable[..., str]) -> Disagree:
    """The parties of a disagreement: the largest is the majority, unless another is as large."""
    sides: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        sides.setdefault(values[rank], []).append(rank)
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
    parties = tuple(Party(tuple(ranks), show(value)) for value, ranks in ordered)
    tie = len(ordered[0][1]) == len(ordered[1][1])
    minority = () if tie else tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
    return Disagree(aspect, severity, minority, parties, "; ".join(f"{ranks_phrase(p.ranks)}: {p.what}" for p in parties))
