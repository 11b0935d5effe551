"""A traced collective as the tracer's hot path records it."""

from __future__ import annotations

from typing import Any

from commlens.model.trace import Cause, Owner, Phase
from commlens.tap.interned_args import InternedArgs
from commlens.tracing.modules import ModuleCall
from commlens.tracing.stacks import StackInfo


class RawEvent:
    """One collective. ``trace_events.py`` turns it into an event of the trace."""

    __slots__ = ("args", "call", "cause", "functional", "info", "owner", "path", "phase", "reduce_op", "returned_ns", "sequence",
                 "started_ns", "step", "thread", "wait_began_ns", "wait_ended_ns")  # fmt: skip

    args: InternedArgs
    info: StackInfo
    phase: Phase | None
    call: ModuleCall | None
    path: str | None
    owner: Owner | None
    cause: Cause | None
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
    def op(self) -> str:
        """The wire op."""
        return self.args.op

    @property
    def dispatcher_op(self) -> str:
        """The ``c10d`` op, ``"allreduce_"``."""
        name: str = self.args.content["dop"]
        return name
