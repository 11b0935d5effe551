"""The tensors that differ between ranks, found in the tables that the ranks report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from commlens.model.cause import OwnTensors
from commlens.model.numbers import CheckId, Key, Measure, NumbersReport, Relation, TensorTable

Load = Callable[[str], TensorTable | None]
"""Returns a table by its digest; None if it is lost."""

SHOWN: Final = 20
SMALL: Final = 1e-4
"""Relative difference of norms that rounding explains."""


_FLOATING: Final = ("float32", "bfloat16", "float16", "float64")


class RelatedTables(NamedTuple):
    """The tables of ranks that have one relation, by rank."""

    ranks: tuple[int, ...]
    relation: Relation
    tables: dict[int, TensorTable]
    agrees: bool  # all tables are the same

    def by_key(self) -> dict[Key, dict[int, Measure]]:
        """Return the measures of each tensor, by rank."""
        found: dict[Key, dict[int, Measure]] = {}
        for rank, table in self.tables.items():
            for measure in table.measures:
                found.setdefault(measure.key, {})[rank] = measure
        return found


class Difference(NamedTuple):
    """A tensor that differs between ranks; the side with the most ranks comes first."""

    key: Key
    sides: list[dict[int, Measure]]
    learned: bool

    @property
    def measures(self) -> list[Measure]:
        """One measure of each side: those of a side are alike."""
        return [next(iter(side.values())) for side in self.sides]

    @property
    def ranks(self) -> list[int]:
        """All of its ranks."""
        return sorted(rank for side in self.sides for rank in side)

    @property
    def minority(self) -> list[int]:
        """The ranks that differ from more than half; empty without such a majority."""
        if 2 * len(self.sides[0]) <= len(self.ranks):
            return []
        return sorted(rank for side in self.sides[1:] for rank in side)


def parts_of(reports: Mapping[int, NumbersReport], load: Load) -> list[RelatedTables]:
    """Return the tables that ranks have reported, by relation."""
    refs: dict[tuple[tuple[int, ...], Relation], dict[int, str]] = {}
    for rank, report in sorted(reports.items()):
        for ref in report.tables:
            refs.setdefault((ref.ranks, ref.relation), {})[rank] = ref.digest
    loaded = {digest: load(digest) for part in refs.values() for digest in set(part.values())}
    parts = []
    for (ranks, relation), digests in sorted(refs.items()):
        tables = {
            rank: table
            for rank, digest in digests.items()
            if rank in ranks and (table := loaded[digest]) is not None
        }
        if len(tables) > 1:
            parts.append(RelatedTables(ranks, relation, tables, len(set(digests.values())) == 1))
    return parts


def must_be_equal(part: RelatedTables, check: CheckId) -> bool:
    """Return whether tensors must be equal even if they have not agreed before: at a place of the
    user's choice, tensors that look like replicas count as such.
    """
    return part.relation in ("equal", "output") or (
        part.relation == "presumed" and bool(check.wait_s)
    )


def count_tensors(parts: Iterable[RelatedTables]) -> int:
    """Return the number of tensors that several ranks have reported."""
    keys: set[Key] = set()
    for part in parts:
        for table in {id(table): table for table in part.tables.values()}.values():
            keys |= {each.key for each in table.measures if each.kind != "module"}
    return len(keys)


def digest_of(part: RelatedTables, rank: int) -> int:
    """Return a number that two ranks share if their tables are the same."""
    return hash(tuple(measure.digest for measure in part.tables[rank].measures))


def equal_sides(part: RelatedTables) -> list[dict[int, Measure]]:
    """Return the ranks that have the same table, where there are several."""
    sides: dict[int, dict[int, Measure]] = {}
    for rank, table in part.tables.items():
        if table.measures:
            sides.setdefault(digest_of(part, rank), {})[rank] = table.measures[0]
    return [side for side in sides.values() if len(side) > 1]


# --- differences


def find_differences(parts: Sequence[RelatedTables], tolerance: float) -> list[Difference]:
    """Return the tensors that differ between ranks. Ranks that are compared with one another in
    several tables are compared together.
    """
    by_part = [part.by_key() for part in parts]
    keys = dict.fromkeys(
        key
        for part, measures in zip(parts, by_part, strict=True)
        if not part.agrees
        for key in measures
    )
    found = []
    for key in keys:
        groups: list[dict[int, Measure]] = []
        for measures in by_part:
            joined = dict(measures.get(key, {}))
            apart = []
            for group in groups:
                if joined.keys().isdisjoint(group):
                    apart.append(group)
                else:
                    joined |= group
            groups = [*apart, joined] if joined else apart
        found += differences_of(key, groups, tolerance)
    return found


def differences_of(
    key: Key,
    groups: Iterable[Mapping[int, Measure]],
    tolerance: float,
    *,
    learned: bool = False,
) -> list[Difference]:
    """Return the differences of one tensor, one for each group of ranks that has any."""
    found = []
    for group in groups:
        sides: list[dict[int, Measure]] = []
        for rank, measure in sorted(group.items()):
            side = next(
                (side for side in sides if _agree(next(iter(side.values())), measure, tolerance)),
                None,
            )
            if side is None:
                sides.append({rank: measure})
            else:
                side[rank] = measure
        if len(sides) > 1:
            found.append(Difference(key, _most_ranks_first(sides), learned))
    return found


def _most_ranks_first(sides: Iterable[dict[int, Measure]]) -> list[dict[int, Measure]]:
    return sorted(sides, key=lambda side: (-len(side), min(side)))


def _agree(one: Measure, other: Measure, tolerance: float) -> bool:
    if one.digest == other.digest and one.items == other.items:
        return True
    if one.nans and other.nans:
        return True  # the bits of a NaN mean nothing
    return bool(tolerance) and one.items == other.items and are_close(one, other, tolerance)


def are_close(one: Measure, other: Measure, tolerance: float) -> bool:
    """Return whether norms and means differ by no more than this, relatively."""
    if not all(map(math.isfinite, (one.norm, other.norm, one.mean, other.mean))):
        return False
    scale = max(one.norm, other.norm)
    per_item = scale / max(1, one.items) ** 0.5
    return (
        abs(one.norm - other.norm) <= tolerance * scale
        and abs(one.mean - other.mean) <= tolerance * per_item
    )


def is_telling(measure: Measure) -> bool:
    """Return whether it follows from a tensor's having been equal on all ranks that it must be: a
    counter may be equal for a while by chance.
    """
    return measure.kind == "rng" or (measure.items > 1 and measure.dtype in _FLOATING)


def find_other_order(parts: Sequence[RelatedTables]) -> Difference | None:
    """Return the first parameter that ranks have registered at another place, or the first module
    that they ran at another place, of those that all of them have.
    """
    for part in parts:
        if part.agrees:
            continue
        for kind in ("parameter", "module"):
            if (found := _other_order(part, kind)) is not None:
                return found
    return None


def _other_order(part: RelatedTables, kind: Literal["parameter", "module"]) -> Difference | None:
    measures = {
        rank: [each for each in table.measures if each.kind == kind]
        for rank, table in part.tables.items()
    }
    common = set.intersection(*({each.name for each in some} for some in measures.values()))
    orders: dict[tuple[str, ...], dict[int, Measure]] = {}
    for rank, some in measures.items():
        listed = [each for each in some if each.name in common]
        if listed:
            order = tuple(each.name for each in listed)
            orders.setdefault(order, {})[rank] = listed[0]
    if len(orders) < 2:
        return None
    one, other, *_ = sorted(orders, key=lambda order: -len(orders[order]))
    name = next(a for a, b in zip(one, other, strict=True) if a != b)
    return Difference((kind, name), _most_ranks_first(orders.values()), learned=False)


def find_own_tensors(
    check: CheckId, reports: Mapping[int, NumbersReport], parts: Sequence[RelatedTables]
) -> list[OwnTensors]:
    """Return the parameters and buffers that some ranks lack, of models that are compared whole."""
    if not check.wait_s:
        return []
    own: dict[tuple[int, ...], set[str]] = {}
    for part in parts:
        if part.agrees and len(part.tables) == len(part.ranks):
            continue
        present = [rank for rank in part.ranks if rank in reports]
        for (kind, name), measures in part.by_key().items():
            if kind in ("parameter", "buffer") and len(measures) < len(present):
                own.setdefault(tuple(sorted(measures)), set()).add(name)
    return [OwnTensors(list(ranks), sorted(names)[:SHOWN]) for ranks, names in sorted(own.items())]
