"""The entries of one Flight Recorder dump as columns of raw values.

Two readers build this table, one in Python (:mod:`~commlens.formats.flight_recorder.entries`) and
one in C; :mod:`~commlens.formats.flight_recorder.to_columns` interprets it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from commlens.formats import columns

INT64_MAX: Final = (1 << 63) - 1
STATES: Final = {name: number for number, name in enumerate(columns.STATES[: columns.RETIRED])}

Sizes = tuple[tuple[int, ...], ...]
Signature = tuple[Sizes, tuple[str, ...], Sizes, tuple[str, ...]]
"""Input sizes and dtypes, output sizes and dtypes."""


@dataclass(slots=True)
class Table:
    """One value per entry in each column, as sequences that numpy accepts; lists hold each distinct
    value once.
    """

    about: dict[str, Any]  # the file's other keys
    groups: list[tuple[str, str]] = field(default_factory=list)  # name and description
    names: list[str] = field(default_factory=list)  # profiling names
    signatures: list[Signature] = field(default_factory=list)
    frames: list[tuple[str, int, str]] = field(default_factory=list)  # file, line, function
    # indices into frames, innermost first, as native 32-bit integers
    stacks: list[bytes] = field(default_factory=list)

    group: Any = ()  # int32, index into groups
    name: Any = ()  # int32
    signature: Any = ()  # int32
    stack: Any = ()  # int32, -1 for none
    state: Any = ()  # uint8: 0 scheduled, 1 started, 2 completed
    retired: Any = ()  # uint8
    is_p2p: Any = ()  # uint8
    pg_id: Any = ()  # int64, -1 for none, like all columns below
    record_id: Any = ()
    collective_seq_id: Any = ()
    p2p_seq_id: Any = ()
    op_id: Any = ()
    created_ns: Any = ()
    started_ns: Any = ()
    completed_ns: Any = ()
    timeout_ms: Any = ()
    duration_ms: Any = ()  # float64, -1 for none

    malformed: int = 0  # entries that were skipped
    unknown_states: int = 0  # entries in an unknown state, which were skipped
    truncated: bool = False

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.is_p2p)  # one byte per entry if the column is bytes
