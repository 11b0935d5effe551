"""The cause that fits how tensors came to differ, and the ranks to blame.

The differences of the first kind of tensor that differs are the *roots*: of gradients and
parameters the gradients, since the parameters follow from them. If rank 1 alone has another
``fc.weight``, in one bit, the departure is "one-bit", and rank 1 is to blame by the majority.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

from commlens.model.cause import (
    BlamedBy,
    Confidence,
    Departure,
    DivergedDoubt,
    DivergedTensor,
    OwnTensors,
    TensorKind,
    TensorSide,
)
from commlens.model.numbers import Measure
from commlens.numbers.differences import SMALL, Difference, RelatedTables, are_close
from commlens.numbers.weights import LoneWord, lone_word

TRAINED: Final[tuple[TensorKind, ...]] = (
    "collective-output",
    "hyperparameter",
    "gradient",
    "optimizer-state",
    "parameter",
)
"""The kinds of tensors on which an optimizer's step depends, causes before effects. The output of a
collective is the same on all ranks, whatever they send.
"""

CONFIDENCE: Final[Mapping[DivergedDoubt | None, Confidence]] = {
    None: "high",
    "first-unseen": "medium",
    "others-changed": "medium",
    "inferred": "medium",
    "which-is-right": "low",
    "on-all": "low",
    "no-majority": "low",
}
"""The confidence in the blamed ranks, by what is in doubt."""

_STATES_MAX: Final = 4  # of one parameter
_LAST_OF_SINGLE: Final = 1 << 6  # of 23 bits
_LAST_OF_HALF: Final = 1 << 2  # of 7 or 10 bits
# bytes of an element, of the types in which a single element is looked for
_SIZES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}


def roots_of(differences: Sequence[Difference]) -> list[Difference]:
    """Return the differences of the first kind that differs: the others follow from it."""
    for kind in (*TRAINED, "buffer", "value", "rng"):
        if some := [each for each in differences if each.key[0] == kind]:
            return some
    return []


def all_ranks(differences: Iterable[Difference]) -> list[int]:
    """Return the ranks that have any of the differences."""
    return sorted({rank for each in differences for rank in each.ranks})


def find_lone_word(roots: Sequence[Difference]) -> LoneWord | None:
    """Return the only word that differs, if only one tensor does, or its states in the same
    word.
    """
    if len({root.measures[0].owner for root in roots}) != 1 or len(roots) > _STATES_MAX:
        return None
    words = [_lone_word_of(root) for root in roots]
    if len({word.position if word is not None else None for word in words}) != 1:
        return None
    return words[0]


def _lone_word_of(root: Difference) -> LoneWord | None:
    one, other, *more = root.measures
    if more or (one.items, one.dtype) != (other.items, other.dtype):
        return None
    words = -(-one.items * _SIZES.get(one.dtype, 0) // 4)
    found = lone_word(one.digest - other.digest, words) if words > 1 else None
    if found is None:
        return None
    return None if _is_rounding(one.dtype, found.change) else found


def _is_rounding(dtype: str, change: int) -> bool:
    """Return whether a word's change is one of the last bits of one element, as rounding makes."""
    if dtype == "float32":
        return change < _LAST_OF_SINGLE
    high, low = divmod(change, 1 << 16)  # two elements of half precision
    in_one = not (low and high) and (low or high) < _LAST_OF_HALF
    return dtype in ("bfloat16", "float16") and in_one


def find_departure(
    roots: Sequence[Difference],
    own: Sequence[OwnTensors],
    order: Difference | None,
    lone: LoneWord | None,
    stale: Sequence[int],
    rng: Sequence[Difference],
    equal_at: int | None,
) -> Departure:
    """Return the first cause that fits."""
    kind = roots[0].key[0] if roots else "parameter"
    cases: tuple[tuple[object, Departure], ...] = (
        (order is not None, "other-order"),
        (kind == "rng", "other-random-numbers"),
        (own, "other-tensors"),
        (kind == "hyperparameter", "other-hyperparameters"),
        (stale, "not-updated"),
        (lone is not None and lone.bit is not None, "one-bit"),
        (lone is not None, "one-element"),
        (kind == "collective-output", "other-outputs"),
        (kind == "gradient" and rng, "other-random-numbers"),
        (kind == "gradient", "other-gradients"),
        (equal_at is None and kind != "value", "not-broadcast"),
    )
    for fits, departure in cases:
        if fits:
            return departure
    is_noise = kind == "parameter" and all(
        are_close(one, other, SMALL)
        for root in roots
        for one, other in combinations(root.measures, 2)
    )
    return "rounding" if is_noise else "unclear"


def blame(
    roots: Sequence[Difference], own: Sequence[OwnTensors], ranks: Sequence[int], stale: list[int]
) -> tuple[list[int], BlamedBy]:
    """Return the ranks to blame, and the rule that blames them."""
    culprits = sorted({rank for each in roots for rank in each.minority})
    if not roots:
        fewest = min(own, key=lambda each: len(each.ranks)).ranks
        culprits = fewest if 2 * len(fewest) < len(ranks) else []
    if culprits:
        return culprits, "majority"
    return (stale, "routine") if stale else ([], "undecided")


def doubt_about(blamed_by: BlamedBy, learned: bool) -> DivergedDoubt | None:
    """Return why it is not sure which ranks are to blame."""
    if blamed_by == "undecided":
        return "no-majority"
    if blamed_by == "routine":
        return "others-changed"
    return "inferred" if learned else None


def other_kinds(
    roots: Sequence[Difference], differences: Sequence[Difference], equal: Sequence[RelatedTables]
) -> tuple[list[TensorKind], list[TensorKind]]:
    """Return the other kinds of the first tensor that were compared: equal ones, and others."""
    if not roots or roots[0].key[0] not in ("gradient", "optimizer-state", "parameter"):
        return [], []
    kind, owner = roots[0].key[0], roots[0].measures[0].owner
    differing = {each.key for each in differences}
    keys = {
        measure.key
        for part in equal
        for measure in next(iter(part.tables.values())).measures
        if measure.kind in TRAINED and measure.owner == owner
    }
    unequal = {each[0] for each in keys if each in differing} - {kind}
    same = {each[0] for each in keys} - unequal - {kind}
    return [kind for kind in TRAINED if kind in same], [kind for kind in TRAINED if kind in unequal]


def tensor_of(difference: Difference, lone: LoneWord | None) -> DivergedTensor:
    """Return a difference as data for the verdict."""
    element = bit = None
    if lone is not None:
        size = _SIZES[difference.measures[0].dtype]
        element = lone.position * 4 // size
        if lone.bit is not None:
            at = lone.position * 32 + lone.bit
            element, bit = at // (8 * size), at % (8 * size)
    return DivergedTensor(
        *difference.key,
        [side_of(side) for side in difference.sides],
        element=element,
        bit=bit,
        source=difference.measures[0].source or None,
    )


def side_of(measures: Mapping[int, Measure]) -> TensorSide:
    """Return the ranks of one side, as data for the verdict."""
    measure = next(iter(measures.values()))
    return TensorSide(
        sorted(measures),
        f"{measure.digest:016x}",
        measure.norm if math.isfinite(measure.norm) else None,
        measure.mean if math.isfinite(measure.mean) else None,
        measure.nans,
        measure.infs,
    )
