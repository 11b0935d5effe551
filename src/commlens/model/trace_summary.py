"""The summary of a trace, which the terminal and ``commlens view --json`` render: calls and bytes
by mesh dimension, phase, op and module, and the reasons for them in sentences.
"""

from __future__ import annotations

from typing import Final

import msgspec

from commlens.model.network import Estimate
from commlens.model.trace_times import Times

SUMMARY_SCHEMA: Final = "commlens.trace-summary/1"


class Total(msgspec.Struct):
    """One row of a breakdown: the calls and bytes with this value."""

    name: str
    calls: int = 0
    wire_bytes: int = 0
    group_size: int = 0  # ranks per group, in the breakdown by mesh dimension; 0 if sizes differ
    time_ns: int | None = None  # of the calls whose time is known, from issue to end
    # the part in which the issuing thread was blocked, or in which an accelerator ran nothing else
    waited_ns: int | None = None
    timed: int = 0  # calls whose time is known
    wait_known: int = 0  # calls whose waiting is known


class ModuleTotal(msgspec.Struct):
    """A module, or the sum of modules that differ only in a number: ``layers.0-31.attention``."""

    path: str
    depth: int = 0  # number of ancestors with a row of their own
    modules: int = 1  # number of modules in the row
    own_calls: int = 0  # issued by the modules themselves
    own_bytes: int = 0  # bytes on the wire of these
    calls: int = 0  # including their children's
    wire_bytes: int = 0
    time_ns: int | None = None  # as in Total, including their children's
    waited_ns: int | None = None
    timed: int = 0
    wait_known: int = 0
    # of a shared module: its other paths, unless its parent is shared too
    other_paths: list[str] = msgspec.field(default_factory=list)


class Why(msgspec.Struct):
    """Collectives with one origin and one cause, explained in a sentence."""

    sentence: str
    calls: int = 0
    wire_bytes: int = 0


class Summary(msgspec.Struct, kw_only=True):
    """The summary of a trace. Breakdowns list the costliest row first; bytes are bytes on the wire
    (model/wire_bytes.py).
    """

    schema: str = SUMMARY_SCHEMA
    answer: str  # number of collectives and bytes, over how many steps, on which rank
    rank: int = 0
    world_size: int = 1
    steps: int = 0
    calls: int = 0
    wire_bytes: int = 0
    bytes_known: bool = True
    setup_calls: int = 0  # of the calls, those before the first forward, which no step repeats
    setup_bytes: int = 0  # of the bytes on the wire, those of the setup
    by_mesh_dim: list[Total] = msgspec.field(default_factory=list)
    by_phase: list[Total] = msgspec.field(default_factory=list)
    by_op: list[Total] = msgspec.field(default_factory=list)
    # in the order of the model, parents before children
    by_module: list[ModuleTotal] = msgspec.field(default_factory=list)
    why: list[Why] = msgspec.field(default_factory=list)
    estimate: Estimate | None = None  # of the time on the network that was named; None without one
    times: Times | None = None  # None in a preview, and if there are no collectives
    # ops that touched a buffer of a collective before the wait for it, in sentences
    hazards: list[str] = msgspec.field(default_factory=list)
    coverage: str = ""  # the self-check in words
    complete: bool = True  # every dispatched collective is recorded and classified
    blind: list[str] = msgspec.field(default_factory=list)
