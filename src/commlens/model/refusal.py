"""The calls that strict verification refused, as data beside the exception's text."""

from __future__ import annotations

import msgspec


class RefusedWait(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank that waited in a cycle."""

    rank: int
    collective: str  # "all_reduce #3 of the default group"
    absent: tuple[int, ...]  # the ranks that it waited for
    where: str = ""  # "train.py:21 in main"


class RefusedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """What some ranks had alike in a refused call: a row of the message's table."""

    ranks: tuple[int, ...]
    cells: tuple[str, ...]  # ("[2]", "float32"); the first one differs between the rows
    where: str = ""  # "train.py:21 in main"
    argument: str = ""  # in a user's function, the place that differs: 'inputs["tokens"]'


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """The refused calls, and the ranks that the refusal names."""

    kind: str  # "mismatch/shape", "missing", "dead", "cycle"
    aspect: str = ""  # of a mismatch: "shape", "structure"
    reason: str = (
        ""  # the fault in words: "shape mismatches. All shapes across devices must be valid"
    )
    operation: str = ""  # "`train.gather`  (default group, ranks 0-1, #2)"
    ranks: tuple[int, ...] = ()  # those that raise it
    absent: tuple[int, ...] = ()  # of "dead" and "missing": the ranks that ended or did not arrive
    culprits: tuple[int, ...] = ()  # the ranks whose own arguments are wrong, whatever others do
    waits: tuple[RefusedWait, ...] = ()  # of a cycle
    heading: str = ""  # what the rows' first cells are: "Input shapes"
    rows: tuple[RefusedRow, ...] = ()
