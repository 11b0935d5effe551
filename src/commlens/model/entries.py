"""Entries of several ranks side by side: what ``commlens diagnose --entries`` shows."""

from __future__ import annotations

import msgspec

from commlens.model.collective import Stack


class Cell(msgspec.Struct, frozen=True):
    """What one rank did under one number."""

    op: str  # "all_reduce", "send to 3", "2 x all_gather"
    tensors: str  # "float32[100] SUM"
    end: str  # "in flight", "started", "done", "let go of"
    line: str = ""  # "train.py:20 step"
    stack: Stack = ()

    @property
    def what(self) -> str:
        """``"all_reduce float32[100] SUM"``."""
        return f"{self.op} {self.tensors}".rstrip()


class Column(msgspec.Struct):
    """Ranks that did the same."""

    ranks: list[int]
    cells: list[Cell | None]
    forgotten: list[bool]  # of the missing cells, those that the ring may have overwritten
    role: str = ""


class EntryTable(msgspec.Struct):
    """Entries side by side."""

    group: str
    numbers: list[int]
    columns: list[Column]  # to blame first
    fault: int = 0  # the number that the verdict speaks of, 0 none
    messages: bool = False
    elsewhere: list[tuple[list[int], str]] = []  # ranks, and what they have in flight that is not shown here
    left_out: list[int] = []  # ranks whose columns were left out
    kinds_left_out: int = 0
