"""The entries of one Flight Recorder dump, column by column, as the file has them.

Two readers make this table, one in Python (:mod:`~commlens.formats.flight_recorder.entries`) and one in C; what the columns
mean is worked out once, in :mod:`~commlens.formats.flight_recorder.to_columns`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["INT64_MAX", "STATES", "Signature", "Sizes", "Table"]

INT64_MAX: Final = (1 << 63) - 1
STATES: Final = {"scheduled": 0, "started": 1, "completed": 2}

Sizes = tuple[tuple[int, ...], ...]
Signature = tuple[Sizes, tuple[str, ...], Sizes, tuple[str, ...]]
"""Input sizes and dtypes, output sizes and dtypes."""


@dataclass(slots=True)
class Table:
    """Columns are sequences that numpy can take; tables hold each different value once."""

    about: dict[str, Any]  # everything of the file but its entries
    groups: list[tuple[str, str]] = field(default_factory=list)  # name and description
    names: list[str] = field(default_factory=list)  # profiling names
    signatures: list[Signature] = field(default_factory=list)
    frames: list[tuple[str, int, str]] = field(default_factory=list)  # file, line, function
    stacks: list[bytes] = field(default_factory=list)  # places in frames, innermost first, as 32-bit integers of the machine

    group: Any = ()  # int32, index into groups
    name: Any = ()  # int32
    signature: Any = ()  # int32
    stack: Any = ()  # int32, -1 none
    state: Any = ()  # uint8: 0 scheduled, 1 started, 2 completed
    retired: Any = ()  # uint8
    is_p2p: Any = ()  # uint8
    pg_id: Any = ()  # int64, -1 none, as in all that follow
    record_id: Any = ()
    collective_seq_id: Any = ()
    p2p_seq_id: Any = ()
    op_id: Any = ()
    created_ns: Any = ()
    started_ns: Any = ()
    completed_ns: Any = ()
    timeout_ms: Any = ()
    duration_ms: Any = ()  # float64, -1 none

    left_out: int = 0  # entries that are not as entries are
    strange_states: int = 0  # entries in a state that nobody knows, taken as scheduled
    cut: bool = False  # the file ends too early

    def __len__(self) -> int:
        """How many entries."""
        return len(self.is_p2p)  # one byte each, where the column is bytes
