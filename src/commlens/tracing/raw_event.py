"""A traced collective as the tracer's hot path records it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commlens.model.trace import Owner, Phase, Redistribution
from commlens.tap.interned_args import InternedArgs
from commlens.tracing.attribution.module_calls import ModuleCall
from commlens.tracing.attribution.stacks import StackInfo


@dataclass(init=False, eq=False, repr=False, slots=True)
class RawEvent:
    """One collective. ``trace_events.py`` turns it into an event of the trace."""

    args: InternedArgs
    info: StackInfo
    phase: Phase | None
    call: ModuleCall | None
    path: str | None
    microbatch: int | None
    owner: Owner | None
    cause: Redistribution | None
    functional: Any
    reduce_op: Any
    sequence: int
    step: int
    thread: int
    started_ns: int
    returned_ns: int
    wait_began_ns: int
    wait_ended_ns: int

    @property
    def dispatcher_op(self) -> str:
        """The ``c10d`` op, ``"allreduce_"``."""
        name: str = self.args.content["dop"]
        return name

    @property
    def is_bucket(self) -> bool:
        """Whether DDP's reducer issues it."""
        return self.owner is not None and self.owner.library == "DDP"
