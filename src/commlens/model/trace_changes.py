"""The difference between two traces: collectives that are new, gone, replaced, moved to another
module, or changed in size, group or number.
"""

from __future__ import annotations

from typing import Final

import msgspec

COMPARISON_SCHEMA: Final = "commlens.comparison/1"


class Change(msgspec.Struct, kw_only=True):
    """One difference in the second trace."""

    kind: str  # "new", "gone", "moved", "replaced", "count", "changed", "world-size"
    sentence: str
    op: str = ""
    phase: str | None = None
    module: str | None = None  # folded: "Transformer.layers.0-31.attention"
    group: str = ""  # mesh dimension or other label of the group
    # of "changed" and "moved": field -> before, after
    changed: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)
    calls_before: float = 0
    calls_after: float = 0
    wire_bytes_before: float = 0
    wire_bytes_after: float = 0
    modules: int = 1  # number of modules that changed alike and differ only in a number
    # if traces of several ranks were compared: the ranks with this change
    ranks: list[int] = msgspec.field(default_factory=list)

    @property
    def weight(self) -> float:
        """Affected bytes on the wire, by which changes are sorted."""
        return max(
            abs(self.wire_bytes_after - self.wire_bytes_before),
            self.wire_bytes_before,
            self.wire_bytes_after,
        )


class TimeChange(msgspec.Struct, kw_only=True):
    """The time of something in a step, in both traces: medians over the steps, with their 95 %
    confidence intervals.
    """

    subject: str  # "a step", "waiting in collectives", "all_reduce on tp"
    before_ns: int
    after_ns: int
    before_interval_ns: tuple[int, int]
    after_interval_ns: tuple[int, int]
    moved: bool  # by more than the noise


class TraceComparison(msgspec.Struct, kw_only=True):
    """The differences between two traces, the most important first. False if nothing changed."""

    schema: str = COMPARISON_SCHEMA
    answer: str = ""  # in one sentence
    # the traces cover different numbers of steps, so calls and bytes are per step
    per_step: bool = False
    calls_before: float = 0
    calls_after: float = 0
    wire_bytes_before: float = 0
    wire_bytes_after: float = 0
    changes: list[Change] = msgspec.field(default_factory=list)
    time: str = ""  # whether time moved, in one sentence; empty if it is unknown
    # those that moved; they are no changes
    times: list[TimeChange] = msgspec.field(default_factory=list)
    # sentences about what was not compared, or is not a change of the model
    notes: list[str] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(
            [self.answer, *(f"- {change.sentence}" for change in self.changes), *self.notes]
        )
