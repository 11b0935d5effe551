"""The progress of a job between two dumps."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

MOVEMENT_SCHEMA: Final = "commlens.movement/1"


MovementKind = Literal["still", "moved", "finished", "again", "only-before", "only-after"]


class DumpPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position of a rank in a dump."""

    issued: int  # operations that the rank ever issued
    # the oldest operation in flight: "all_reduce #41 of group dp [0-3]"; "" if none
    in_flight: str = ""
    line: str = ""  # the user's line that issued it: "train.py:81 step"


class Moved(msgspec.Struct):
    """Ranks that made the same progress."""

    ranks: list[int]
    # finished: the op in flight has ended and no new one was issued. again: fewer operations than
    # before, so restarted
    kind: MovementKind
    sentence: str
    before: DumpPosition | None = None  # position of the first of these ranks
    after: DumpPosition | None = None


class Movement(msgspec.Struct, kw_only=True):
    """The progress of all ranks. False if no rank made progress."""

    schema: str = MOVEMENT_SCHEMA
    answer: str = ""  # in one sentence
    apart_s: float = 0.0  # seconds between the last signs of life in the two dumps; 0 if unknown
    ranks: list[Moved] = []  # ranks with the same progress together, ranks that stand still first
    # sentences about ranks that were not compared or files that could not be read
    notes: list[str] = []

    def __bool__(self) -> bool:
        return any(one.kind != "still" for one in self.ranks)
