"""The entries of one Flight Recorder dump as columns of raw values.

Two readers build this table, one in Python (:mod:`~commlens.formats.flight_recorder.entries`) and
one in C; :mod:`~commlens.formats.flight_recorder.to_columns` interprets it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from commlens.formats.columns import RETIRED, Integers
from commlens.formats.columns import STATES as NAMES_OF_STATES

INT64_MAX: Final = (1 << 63) - 1
INTEGER_MAX: Final = 1 << 62  # of what a recorder writes
STATES: Final = {name: number for number, name in enumerate(NAMES_OF_STATES[:RETIRED])}

Sizes = tuple[tuple[int, ...], ...]
Signature = tuple[Sizes, tuple[str, ...], Sizes, tuple[str, ...]]
"""Input sizes and dtypes, output sizes and dtypes."""

COLUMNS: Final = {
    "group": "int32",  # index into groups
    "name": "int32",
    "signature": "int32",
    "stack": "int32",  # -1 for none
    "state": "uint8",  # index into STATES
    "retired": "bool",
    "is_p2p": "bool",
    "pg_id": "int64",  # -1 for none, like all columns below
    "record_id": "int64",
    "collective_seq_id": "int64",
    "p2p_seq_id": "int64",
    "op_id": "int64",
    "created_ns": "int64",
    "started_ns": "int64",
    "completed_ns": "int64",
    "timeout_ms": "int64",
    "duration_ms": "float64",
}
"""The columns of :class:`EntryColumns` and their types, as both readers fill them."""


@dataclass(slots=True)
class EntryColumns:
    """One value per entry in each column; lists hold each distinct value once."""

    about: dict[str, Any]  # the file's other keys
    groups: list[tuple[str, str]] = field(default_factory=list)  # name and description
    names: list[str] = field(default_factory=list)  # profiling names
    signatures: list[Signature] = field(default_factory=list)
    frames: list[tuple[str, int, str]] = field(default_factory=list)  # file, line, function
    # indices into frames, innermost first, as native 32-bit integers
    stacks: list[bytes] = field(default_factory=list)
    # by COLUMNS, as sequences or as bytes; empty if there are no entries
    columns: dict[str, Any] = field(default_factory=dict)
    malformed: int = 0  # entries that were skipped
    unknown_states: int = 0  # entries in an unknown state, which were skipped
    truncated: bool = False

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.columns.get("is_p2p", ()))  # one byte per entry if the column is bytes

    def column(self, name: str) -> Integers:
        """Return a column as an array. 64-bit integers that no recorder writes become -1, so that
        differences do not overflow.
        """
        column, dtype = self.columns.get(name, ()), COLUMNS[name]
        packed = isinstance(column, (bytes, bytearray, memoryview))
        values = np.frombuffer(column, dtype) if packed else np.asarray(column, dtype)
        if dtype == "int64":
            return np.where((values < -1) | (values > INTEGER_MAX), -1, values)
        return values
