"""What a trace is: which collectives one rank issued, when, why, and how many bytes. Plain data; nothing here needs torch."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from commlens.model.collective import Frame, ProcessGroup

SCHEMA: Final = "commlens.trace/1"


class Phase(str, Enum):
    """In which part of a training step a collective was issued."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"  # a forward that activation checkpointing runs again, inside backward
    OPTIMIZER = "optimizer"  # inside an optimizer's step()
    OUTSIDE = "outside"  # of every module: clipping, metrics, plain calls


class Depth(str, Enum):
    """How much a trace looks at."""

    COLLECTIVES = "collectives"
    OPS = "ops"  # DTensor and tensor ops too: needs a dispatch mode, which is felt


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose parameters a library's collective carries. Not always where it was issued: FSDP2 prefetches one block inside another."""

    library: str  # "FSDP2", "FSDP", "DDP"
    name: str  # FSDP2: path of the wrapped block; DDP: "bucket 0"
    parameters: tuple[str, ...] = ()  # their names in the wrapped model, where the library says


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """The DTensor redistribution that a collective carries out."""

    op: str | None  # "aten.addmm.default"; None where the redistribution was asked for and no op needed it
    before: str  # "(Shard(dim=0),)"
    after: str  # "(Replicate(),)"
    implicit: bool  # DTensor decided on it to run the op; else the program (or a parallel plan) called redistribute()
    mesh: str = ""  # "DeviceMesh((4,), ...)" as torch prints it


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One collective; or, in the summarised part of a long trace, all collectives that differ only in when they ran."""

    sequence: int  # 1, 2, ... in order of issue, over everything that the rank issued while traced
    op: str  # the wire op: "all_reduce"
    api: str  # as CommDebugMode names it: "c10d.allreduce_", "c10d_functional.all_reduce"
    phase: Phase | None  # None: could not be told (unclassified)
    group: int  # index into TraceData.groups
    site: str | None = None  # path of the module whose forward issued it (or whose backward did): "Transformer.layers.0.attention"
    call: int = 0  # which call of that module within the trace, from 1; 0 outside of modules
    owner: Owner | None = None
    cause: Cause | None = None
    source: Frame | None = None  # the user's line
    through: str | None = None  # the library function that the user's line called: "clip_grad_norm_"; None where it was torch.distributed's
    dtype: str = ""  # of the first tensor; "" for ops that carry none
    input_bytes: int = 0
    output_bytes: int = 0
    wire_bytes: int = 0  # model/wire_bytes.py
    reduce_op: str | None = None
    root: int | None = None  # global rank
    peer: int | None = None  # global rank, point-to-point only
    tag: int = 0
    asynchronous: bool | None = None  # None where torch does not say
    members: int = 0  # of a coalesced group: how many ops it joins; 0 for one that is alone
    thread: int = 0  # index of the issuing thread, in order of appearance; 0 is the first one, usually the main thread
    step: int = 0  # optimizer steps completed before it, since the trace began
    started_ns: int = 0  # since the trace began, all four; 0 in summarised events
    returned_ns: int = 0
    wait_began_ns: int = 0  # 0: nobody was seen to wait for it
    wait_ended_ns: int = 0
    count: int = 1  # more than 1 in summarised events only
    last_step: int | None = None  # of the last one that a summarised event stands for

    @property
    def classified(self) -> bool:
        """Whether its phase is known, and inside a forward or backward pass its module."""
        inside = self.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTATION)
        return self.phase is not None and (self.site is not None or not inside)


class TracedParameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A parameter of a module, as it lay between two steps."""

    name: str  # "weight"
    placements: str = ""  # "(Shard(dim=0),)"; "" where it is no DTensor
    shape: tuple[int, ...] | None = None  # of the whole tensor; None where it is not known
    dtype: str = ""
    local_bytes: int | None = None  # what this rank holds of it
    mesh: str = ""  # "DeviceMesh((4,), ...)" as torch prints it


class TracedModule(msgspec.Struct, omit_defaults=True):
    """A module that was called while traced: one row, however often."""

    path: str  # root's class name and the child's path: "MLPModule.net1"
    type: str  # "torch.nn.modules.linear.Linear"
    calls: int = 0
    parent: int | None = None  # index into TraceData.modules: the module whose call contained its first call
    parameters: tuple[TracedParameter, ...] = ()  # its own, not its children's


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
    """The self-check: nothing is dropped, and what could not be told is said."""

    dispatched: int = 0  # collectives that passed the dispatcher while traced
    recorded: int = 0  # of them in the trace, summarised ones counted in full
    unclassified: int = 0  # of the recorded ones, those whose phase or module could not be told
    blind: list[str] = msgspec.field(default_factory=list)  # what the trace cannot see here, in sentences


class TraceData(msgspec.Struct, kw_only=True):
    """The collectives of one rank: what a trace file holds. ``commlens.Trace`` wraps it with what people do with it."""

    schema: str = SCHEMA
    commlens_version: str = ""
    torch_version: str = ""
    script: str = ""
    rank: int = 0
    world_size: int = 1
    preview: bool = False  # made on the fake backend, in one process: times mean nothing
    depth: Depth = Depth.COLLECTIVES
    started_unix_ns: int = 0
    steps: int = 0  # optimizer steps that completed, of those that were to be traced
    whole_steps: int | None = None  # events of later steps are summarised; None: none is
    groups: list[ProcessGroup] = msgspec.field(default_factory=list)
    modules: list[TracedModule] = msgspec.field(default_factory=list)
    events: list[TraceEvent] = msgspec.field(default_factory=list)
    ops: list[TracedOp] = msgspec.field(default_factory=list)
    coverage: Coverage = msgspec.field(default_factory=Coverage)

    def group_of(self, event: TraceEvent) -> ProcessGroup:
        """The process group of an event."""
        return self.groups[event.group]
