"""What moved between two dumps of one job, as data."""

from __future__ import annotations

from typing import Final

import msgspec

MOVEMENT_SCHEMA: Final = "commlens.movement/1"


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a rank was."""

    issued: int  # operations that it ever issued
    in_flight: str = ""  # the oldest that had not ended: "all_reduce #41 of group dp [0-3]"; "" none
    line: str = ""  # "train.py:81 step", that issued it


class Moved(msgspec.Struct):
    """Ranks of which the same is to be said."""

    ranks: list[int]
    kind: str  # "still", "moved", "finished", "again", "only-before", "only-after"
    sentence: str
    before: Place | None = None  # of the first of them
    after: Place | None = None


class Movement(msgspec.Struct, kw_only=True):
    """What moved. False where no rank did."""

    schema: str = MOVEMENT_SCHEMA
    answer: str = ""
    apart_s: float = 0.0  # between the two dumps, 0 where they do not say
    ranks: list[Moved] = []  # those that stand still first
    notes: list[str] = []

    def __bool__(self) -> bool:
        return any(one.kind != "still" for one in self.ranks)
