"""Ranks' columns, seen as the rest of diagnosis sees black boxes: operations become objects when somebody looks at them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from commlens.diagnosis.extract import DONE, Extract, Integers
from commlens.diagnosis.routine import letters
from commlens.model.collective import Channel, Collective, CollectiveArgs, LearnedHow, State
from commlens.model.ops import POINT_TO_POINT, UNEVEN


class Catalogue:
    """Numbers for what was asked and the lines that asked it, the same on all ranks."""

    def __init__(self) -> None:
        self._signatures: dict[Hashable, int] = {}
        self._tokens: dict[Hashable, int] = {}
        self._by_asked: dict[int, tuple[Sequence[CollectiveArgs], Integers]] = {}
        self._by_site: dict[int, tuple[object, Integers]] = {}

    def signatures(self, table: Sequence[CollectiveArgs]) -> Integers:
        """For each entry of a table the number of what must be equal between ranks."""
        known = self._by_asked.get(id(table))
        if known is None:
            numbers = [self._signatures.setdefault(signature(asked), len(self._signatures)) for asked in table]
            known = self._by_asked[id(table)] = (table, np.array(numbers or [0], "int64"))
        return known[1]

    def sites(self, table: Sequence[Sequence[object]]) -> Integers:
        """For each entry of a table of lines the number of its innermost one; the last one is of no line."""
        known = self._by_site.get(id(table))
        if known is None:
            numbers = [self._tokens.setdefault(lines[0] if lines else None, len(self._tokens) + 1) for lines in table]
            known = self._by_site[id(table)] = (table, np.array([*numbers, 0], "int64"))
        return known[1]


def signature(asked: CollectiveArgs) -> Hashable:
    """What ranks that meet must have in common, as far as a recorder of another tool tells. all_to_all's splits it does not tell."""
    specs = asked.inputs or asked.outputs
    if asked.op == "scatter":
        specs = asked.outputs or asked.inputs[:1]
    if asked.op in UNEVEN or not specs:
        return (asked.op, frozenset(spec.dtype for spec in specs))
    return (asked.op, tuple((spec.shape, spec.dtype) for spec in specs))


class RankColumns:
    """One rank's operations, each made into an object once and only when it is asked for."""

    def __init__(self, found: Extract, channels: Sequence[Channel], catalogue: Catalogue) -> None:
        self.extract = found
        self.channels = channels
        self.catalogue = catalogue
        self._made: dict[int, Collective] = {}

    def op(self, row: int) -> Collective:
        """The operation of a row."""
        made = self._made.get(row)
        if made is None:
            made = self._made[row] = self._make(row)
        return made

    def _make(self, row: int) -> Collective:
        e = self.extract
        site, peer = int(e.site[row]), int(e.peer[row])
        ended = int(e.state[row]) == DONE
        created = int(e.created_ns[row])
        return Collective(
            index=int(e.record[row]) + 1,
            channel=self.channels[int(e.channel[row])],
            sequence_number=int(e.number[row]),
            args=e.args[int(e.args_index[row])],
            state=State.COMPLETED if ended else State.ISSUED,
            announced_ns=created,
            entered_ns=created,
            returned_ns=created,
            done_ns=int(e.completed_ns[row]),
            learned_how=LearnedHow.NATIVE_RECORDER if ended else LearnedHow.NOT_YET,
            stack=e.sites[site] if site >= 0 else (),
            peer=peer if peer >= 0 else None,
        )


class ColumnOps(Mapping[int, Collective]):
    """What a rank issued on one channel, by sequence number."""

    def __init__(self, columns: RankColumns, rows: Integers) -> None:
        self.columns = columns
        numbers = columns.extract.number[rows]
        if len(numbers) > 1 and not (np.diff(numbers) > 0).all():
            numbers, first = np.unique(numbers[::-1], return_index=True)  # of several under one number the last
            rows = rows[::-1][first]
        self.rows = rows
        self.numbers = numbers

    def row(self, number: int) -> int | None:
        """Its row, if it is there."""
        at = int(np.searchsorted(self.numbers, number))
        return int(self.rows[at]) if at < len(self.numbers) and int(self.numbers[at]) == number else None

    def __getitem__(self, number: int) -> Collective:
        row = self.row(number)
        if row is None:
            raise KeyError(number)
        return self.columns.op(row)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.row(number) is not None

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)

    def signatures(self) -> Integers:
        """What must be equal between ranks, of each number."""
        e = self.columns.extract
        numbers: Integers = self.columns.catalogue.signatures(e.args)[e.args_index[self.rows]]
        return numbers

    def tokens(self) -> Integers:
        """The same with the line that issued it."""
        e = self.columns.extract
        sites: Integers = self.columns.catalogue.sites(e.sites)[e.site[self.rows]]
        return self.signatures() * (1 << 32) + sites


class ColumnHistory(Sequence[Collective]):
    """Everything that one rank issued, oldest first."""

    def __init__(self, columns: RankColumns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns.extract)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> list[Collective]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.columns.op(row) for row in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.columns.op(index)

    def texts(self) -> tuple[str, str]:
        """The rank's routine as two texts, one letter for each operation: with its line and sizes, and without."""
        e = self.columns.extract
        asked = e.args_index.astype("int64")
        sites = self.columns.catalogue.sites(e.sites)[e.site]
        ops: dict[str, int] = {}
        op = np.array([ops.setdefault(one.op, len(ops)) for one in e.args] or [0])[asked] if len(e) else asked
        where = e.channel.astype("int64") * (1 << 20) + (e.peer.astype("int64") + 1)
        return letters(where, op, self.catalogue_sizes(asked), sites), letters(where, op)

    def catalogue_sizes(self, asked: Integers) -> Integers:
        """A number for the sizes of each operation; those of all_to_all vary by right."""
        e = self.columns.extract
        if not len(e):
            return asked
        vary = np.array([one.op == "all_to_all" for one in e.args])
        return np.where(vary[asked], -1, asked)


def is_message(asked: Sequence[CollectiveArgs], index: Integers) -> Integers:
    """Which operations are sends or receives."""
    table = np.array([one.op in POINT_TO_POINT for one in asked] or [False])
    found: Integers = table[index] if len(index) else np.zeros(0, "bool")
    return found
