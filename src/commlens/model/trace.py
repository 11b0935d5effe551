"""A trace as data: the collectives of one rank, with their times, causes and sizes. Needs no
torch.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from commlens.model.collective import Frame, ProcessGroup
from commlens.model.hazard import Hazard

SCHEMA: Final = "commlens.trace/1"


class Phase(str, Enum):
    """The part of a training step in which a collective was issued."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"  # forward that activation checkpointing repeats inside backward
    OPTIMIZER = "optimizer"  # inside an optimizer's step()
    OUTSIDE = "outside"  # outside all modules: clipping, metrics, plain calls


class Depth(str, Enum):
    """The level of detail of a trace."""

    COLLECTIVES = "collectives"
    OPS = "ops"  # also DTensor and tensor ops: needs a dispatch mode, which costs time


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """The owner of the parameters in a library's collective. Not always the issuing module: FSDP2
    prefetches one block inside another.
    """

    library: str  # "FSDP2", "FSDP", "DDP"
    name: str  # FSDP2: path of the wrapped block; DDP: "bucket 0"
    # their names in the wrapped model, if the library reports them
    parameters: tuple[str, ...] = ()


class Redistribution(msgspec.Struct, frozen=True, omit_defaults=True):
    """The DTensor redistribution that a collective performs."""

    # "aten.addmm.default"; None if the redistribution was requested and not needed by an op
    op: str | None
    before: str  # "(Shard(dim=0),)"
    after: str  # "(Replicate(),)"
    # DTensor redistributed to run the op; else the program (or a parallel plan) called
    # redistribute()
    implicit: bool
    mesh: str = ""  # "DeviceMesh((4,), ...)" as torch prints it


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One collective; in the summarised part of a long trace, all collectives that differ only in
    time.
    """

    sequence: int  # 1, 2, ... in order of issue, over all collectives of the traced rank
    op: str  # the wire op: "all_reduce"
    api: str  # as CommDebugMode names it: "c10d.allreduce_", "c10d_functional.all_reduce"
    phase: Phase | None  # None: unknown (unclassified)
    group: int  # index into TraceData.groups
    # path of the module whose forward or backward issued it: "Transformer.layers.0.attention"
    site: str | None = None
    call: int = 0  # number of the module's call within the trace, from 1; 0 outside modules
    microbatch: int | None = None  # of a pipeline schedule, from 0; None outside of one
    owner: Owner | None = None
    cause: Redistribution | None = None
    source: Frame | None = None  # the user's line
    # the library function that the user's line called: "clip_grad_norm_"; None if it called
    # torch.distributed
    through: str | None = None
    dtype: str = ""  # of the first tensor; "" for ops without tensors
    input_bytes: int = 0
    output_bytes: int = 0
    wire_bytes: int = 0  # bytes on the wire, by the rule in model/wire_bytes.py
    reduce_op: str | None = None
    root: int | None = None  # global rank
    peer: int | None = None  # global rank, point-to-point only
    tag: int = 0
    asynchronous: bool | None = None  # None if torch does not say
    members: int = 0  # number of ops in the coalesced group; 0 if not coalesced
    # index of the issuing thread in order of appearance; 0 is usually the main thread
    thread: int = 0
    step: int = 0  # optimizer steps completed before it, since the trace began
    started_ns: int = 0  # ns since the trace began, like the next three; 0 in summarised events
    returned_ns: int = 0
    wait_began_ns: int = 0  # 0: no thread was seen waiting for it
    wait_ended_ns: int = 0
    # the collective's own time, as the backend or a profiler measured it; 0 if unknown
    duration_ns: int = 0
    overlapped_ns: int | None = None  # the part of it in which other work ran, by the profiler
    count: int = 1  # more than 1 in summarised events only
    last_step: int | None = None  # step of the last collective in a summarised event

    @property
    def classified(self) -> bool:
        """Whether the phase is known and, inside a forward or backward pass, the module."""
        inside = self.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTATION)
        return self.phase is not None and (self.site is not None or not inside)


class TracedParameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A parameter of a module between two steps."""

    name: str  # "weight"
    placements: str = ""  # "(Shard(dim=0),)"; "" if it is not a DTensor
    shape: tuple[int, ...] | None = None  # of the whole tensor; None if unknown
    dtype: str = ""
    local_bytes: int | None = None  # bytes of it on this rank
    mesh: str = ""  # "DeviceMesh((4,), ...)" as torch prints it


class TracedModule(msgspec.Struct, omit_defaults=True):
    """A module that was called while traced: one row for all its calls."""

    path: str  # root class name and child path: "MLPModule.net1"
    type: str  # "torch.nn.modules.linear.Linear"
    calls: int = 0
    # index into TraceData.modules: the module whose call contained its first call
    parent: int | None = None
    parameters: tuple[TracedParameter, ...] = ()  # its own, not its children's
    # of a shared module: its other paths, where they do not have a row of their own
    other_paths: tuple[str, ...] = ()


class TracedOp(msgspec.Struct, omit_defaults=True):
    """One tensor op, at depth ``ops``."""

    name: str  # "aten.addmm.default"
    before_sequence: int  # the next collective after it has at least this sequence number
    phase: Phase | None
    site: str | None = None
    input_shapes: tuple[tuple[int, ...], ...] = ()
    input_placements: tuple[str, ...] = ()  # DTensor ops only
    mesh: str | None = None  # DTensor ops only


class Coverage(msgspec.Struct):
    """The self-check: whether collectives are missing or unclassified."""

    dispatched: int = 0  # collectives that passed the dispatcher while traced
    recorded: int = 0  # of these, collectives in the trace, summarised ones counted in full
    unclassified: int = 0  # of the recorded ones, those of unknown phase or module
    # sentences about what the trace cannot see here
    blind: list[str] = msgspec.field(default_factory=list)


class TraceData(msgspec.Struct, kw_only=True):
    """The collectives of one rank, as in a trace file. ``commlens.Trace`` adds methods to it."""

    schema: str = SCHEMA
    commlens_version: str = ""
    torch_version: str = ""
    script: str = ""
    rank: int = 0
    world_size: int = 1
    preview: bool = False  # made on the fake backend, in one process: times mean nothing
    depth: Depth = Depth.COLLECTIVES
    started_unix_ns: int = 0
    steps: int = 0  # optimizer steps that completed while traced
    whole_steps: int | None = None  # events of later steps are summarised; None: no events are
    # sequence number of the last collective before the first forward; 0: there was none; None:
    # unknown
    setup_until: int | None = None
    groups: list[ProcessGroup] = msgspec.field(default_factory=list)
    modules: list[TracedModule] = msgspec.field(default_factory=list)
    events: list[TraceEvent] = msgspec.field(default_factory=list)
    ops: list[TracedOp] = msgspec.field(default_factory=list)
    # ops that touched a buffer of a collective between its issue and the wait for it
    hazards: list[Hazard] = msgspec.field(default_factory=list)
    coverage: Coverage = msgspec.field(default_factory=Coverage)

    def group_of(self, event: TraceEvent) -> ProcessGroup:
        """Return the process group of an event."""
        return self.groups[event.group]

    def is_setup(self, event: TraceEvent) -> bool:
        """Tell whether an event belongs to the setup before the first forward, which no step
        repeats.
        """
        return self.setup_until is not None and event.sequence <= self.setup_until
