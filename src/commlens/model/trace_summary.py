"""What a trace comes to, as data: the terminal and ``commlens view --json`` are renderings of it."""

from __future__ import annotations

from typing import Final

import msgspec

SUMMARY_SCHEMA: Final = "commlens.trace-summary/1"


class Total(msgspec.Struct):
    """One row of a breakdown: so many calls and bytes have this value."""

    name: str
    calls: int = 0
    wire_bytes: int = 0
    group_size: int = 0  # of the breakdown by mesh dimension; 0 where sizes differ


class ModuleTotal(msgspec.Struct):
    """A module, or modules that differ only in a number: ``layers.0-31.attention``. What is folded is added up."""

    path: str
    depth: int = 0  # how many of its ancestors have a row of their own
    modules: int = 1  # how many are folded into the row
    own_calls: int = 0  # issued by the modules themselves
    own_bytes: int = 0  # on the wire
    calls: int = 0  # with those of their children
    wire_bytes: int = 0


class Why(msgspec.Struct):
    """Collectives of one place and one cause, with the reason in a sentence."""

    sentence: str
    calls: int = 0
    wire_bytes: int = 0


class Summary(msgspec.Struct, kw_only=True):
    """What a trace comes to. Breakdowns have the costliest row first; bytes are bytes on the wire (model/wire_bytes.py)."""

    schema: str = SUMMARY_SCHEMA
    answer: str  # how many collectives, how many bytes, over how many steps, of which rank
    rank: int = 0
    world_size: int = 1
    steps: int = 0
    calls: int = 0
    wire_bytes: int = 0
    bytes_known: bool = True
    by_mesh_dim: list[Total] = msgspec.field(default_factory=list)
    by_phase: list[Total] = msgspec.field(default_factory=list)
    by_op: list[Total] = msgspec.field(default_factory=list)
    by_module: list[ModuleTotal] = msgspec.field(default_factory=list)  # in the order of the model, parents before children
    why: list[Why] = msgspec.field(default_factory=list)
    coverage: str = ""  # the self-check in words
    complete: bool = True  # everything that was dispatched is recorded and classified
    blind: list[str] = msgspec.field(default_factory=list)
