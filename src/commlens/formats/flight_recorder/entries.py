"""Build the table of a dump's entries from its plain data, a dict from pickle or JSON. This reader
supports every file.
"""

from __future__ import annotations

import itertools
import math
from array import array
from typing import Any, Final

from commlens.errors import FormatError
from commlens.formats.flight_recorder.table import (
    COLUMNS,
    INT64_MAX,
    STATES,
    EntryColumns,
    Signature,
    Sizes,
)

# sizes and frames in total: shared lists let a small file claim billions
_ITEMS_MAX: Final = 20_000_000


def build_table(value: Any, *, truncated: bool = False) -> EntryColumns:
    """Return the table of a dump's entries.

    Raises:
        FormatError: the data is not a Flight Recorder dump. The message is a sentence about "It".
    """
    if not isinstance(value, dict) or not any(
        key in value for key in ("entries", "pg_config", "pg_status")
    ):
        raise FormatError(
            "It is not a Flight Recorder dump: it has neither entries nor process groups."
        )
    entries = value.get("entries", [])
    if not isinstance(entries, (list, tuple)):
        raise FormatError("It is not a Flight Recorder dump: its entries are not a list.")
    builder = _EntryBuilder(
        EntryColumns(
            about={key: content for key, content in value.items() if key != "entries"},
            truncated=truncated,
        )
    )
    for entry in entries:
        builder.add(entry)
    return builder.finish()


class _Malformed(Exception):
    """An entry lacks a required key, or a value has the wrong type."""


class _UnknownState(_Malformed):
    """No known version of torch writes the name of an entry's state, so it is unknown whether the
    op has ended.
    """


class _EntryBuilder:
    def __init__(self, table: EntryColumns) -> None:
        self.table = table
        self.items = 0
        self.groups: dict[tuple[str, str], int] = {}
        self.names: dict[str, int] = {}
        self.signatures: dict[Signature, int] = {}
        self.frames: dict[tuple[str, int, str], int] = {}
        self.frame_of: dict[int, int] = {}  # by the id of its dict, which the dump keeps alive
        self.stacks: dict[bytes, int] = {}
        self.stack_of: dict[tuple[int, ...], int] = {}  # by the ids of its frames' dicts
        self.rows: list[tuple[Any, ...]] = []

    def add(self, entry: Any) -> None:
        """Add an entry; a malformed one is counted and skipped."""
        try:
            self.rows.append(self._row(entry))
        except _UnknownState:
            self.table.unknown_states += 1
        except _Malformed:
            self.table.malformed += 1

    def finish(self) -> EntryColumns:
        table = self.table
        table.groups, table.names = list(self.groups), list(self.names)
        table.signatures = list(self.signatures)
        table.frames, table.stacks = list(self.frames), list(self.stacks)
        if self.rows:
            table.columns = dict(zip(COLUMNS, zip(*self.rows, strict=True), strict=True))
        return table

    def _row(self, entry: Any) -> tuple[Any, ...]:
        """Return the values of an entry by ``COLUMNS``."""
        if type(entry) is not dict or "profiling_name" not in entry or "state" not in entry:
            raise _Malformed
        get = entry.get
        name = get("profiling_name")
        if type(name) is not str:
            raise _Malformed
        state = get("state")
        known = STATES.get(state) if type(state) is str else None
        if known is None:
            raise _UnknownState
        created = get("time_created_ns")
        if created is None and type(micros := get("time_created_us")) is int:
            created = micros * 1000  # torch 2.2
        sequence = get("collective_seq_id", get("seq_id"))
        frames = get("frames")
        # All that may be malformed comes first: the tables hold nothing of entries that are
        # skipped.
        group = self._group(get("process_group"), get("pg_id"))
        signature = (
            self._sizes(get("input_sizes")),
            self._dtypes(get("input_dtypes")),
            self._sizes(get("output_sizes")),
            self._dtypes(get("output_dtypes")),
        )
        stack = self._stack(frames) if frames else -1
        return (
            _index(self.groups, group),
            _index(self.names, name),
            _index(self.signatures, signature),
            stack,
            known,
            get("retired") is True,
            get("is_p2p") is True,
            _integer(get("pg_id")),
            _integer(get("record_id", get("id"))),
            _integer(sequence),
            _integer(get("p2p_seq_id")),
            _integer(get("op_id")),
            _integer(created),
            _integer(get("time_discovered_started_ns")),
            _integer(get("time_discovered_completed_ns")),
            _integer(get("timeout_ms")),
            _duration(get("duration_ms")),
        )

    def _group(self, value: Any, pg_id: Any) -> tuple[str, str]:
        if type(value) is str:
            return (value, "")
        if (
            type(value) in (tuple, list)
            and len(value) == 2
            and type(value[0]) is str
            and type(value[1]) is str
        ):
            return (value[0], value[1])
        if value is None and type(pg_id) is int:
            return (str(pg_id), "")  # torch 2.2 records only the group's number
        raise _Malformed

    def _sizes(self, value: Any) -> Sizes:
        shapes = tuple(map(self._items, self._items(() if value is None else value)))
        for size in itertools.chain(*shapes):
            if type(size) is not int or not -INT64_MAX <= size <= INT64_MAX:
                raise _Malformed
        return shapes

    def _dtypes(self, value: Any) -> tuple[str, ...]:
        dtypes = self._items(() if value is None else value)
        if not all(type(dtype) is str for dtype in dtypes):
            raise _Malformed
        return dtypes

    def _items(self, value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple):
            raise _Malformed
        self._count(len(value))
        return tuple(value)

    def _stack(self, frames: Any) -> int:
        if type(frames) is not list:
            raise _Malformed
        self._count(len(frames))
        key = tuple(map(id, frames))
        known = self.stack_of.get(key)
        if known is None:
            known = self.stack_of[key] = _index(
                self.stacks, array("i", map(self._frame, frames)).tobytes()
            )
        return known

    def _frame(self, frame: Any) -> int:
        known = self.frame_of.get(id(frame))
        if known is None:
            if type(frame) is not dict:
                raise _Malformed
            file, line, function = frame.get("filename"), frame.get("line"), frame.get("name")
            if type(file) is not str or type(function) is not str:
                raise _Malformed
            known = self.frame_of[id(frame)] = _index(
                self.frames, (file, max(_integer(line), 0), function)
            )
        return known

    def _count(self, items: int) -> None:
        self.items += items
        if self.items > _ITEMS_MAX:
            raise FormatError(
                f"It claims more than {_ITEMS_MAX} sizes and stack frames, which no dump has."
            )


def _index(known: dict[Any, int], value: Any) -> int:
    return known.setdefault(value, len(known))


def _integer(value: Any) -> int:
    """Return an integer that fits in 64 bits; -1 for anything else."""
    return value if type(value) is int and -INT64_MAX <= value <= INT64_MAX else -1


def _duration(value: Any) -> float:
    return (
        float(value)
        if type(value) in (float, int) and math.isfinite(value) and 0 <= value < 1e12
        else -1.0
    )
