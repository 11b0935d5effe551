"""The table of ``commlens diagnose --entries``: entries of several ranks side by side. Each column
holds the ranks with equal entries, each row is a sequence number of the group.
"""

from __future__ import annotations

import msgspec

from commlens.model.collective import Stack


class EntryCell(msgspec.Struct, frozen=True):
    """One rank's entry under a sequence number."""

    op: str  # "all_reduce", "send to 3", "2 x all_gather"
    tensors: str  # "float32[100] SUM"
    end: str  # "in flight", "started", "done", "retired"
    line: str = ""  # "train.py:20 step"
    stack: Stack = ()

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.end in ("in flight", "started")

    @property
    def what(self) -> str:
        """``"all_reduce float32[100] SUM"``."""
        return f"{self.op} {self.tensors}".rstrip()


class Column(msgspec.Struct):
    """Ranks with equal entries."""

    ranks: list[int]
    cells: list[EntryCell | None]
    # for each missing collective, whether the ring buffer may have overwritten it; never for
    # messages
    forgotten: list[bool]
    role: str = ""


class EntryTable(msgspec.Struct):
    """Entries of ranks, side by side."""

    group: str
    numbers: list[int]
    columns: list[Column]  # culprits first
    fault: int = 0  # sequence number in the verdict; 0 if none
    messages: bool = False
    # ranks, and their ops in flight that the table does not show
    elsewhere: list[tuple[list[int], str]] = []
    left_out: list[int] = []  # ranks whose columns were left out
    kinds_left_out: int = 0

    @property
    def has_open(self) -> bool:
        """Whether an entry is in flight."""
        return any(
            cell is not None and cell.is_open for column in self.columns for cell in column.cells
        )
