"""Depth ``ops``: a dispatch mode that records every tensor op with its module and phase, and the
placements of DTensor ops.

For example, ``nn.Linear`` named ``net1`` on DTensors in a tensor-parallel model gives ::

    aten.addmm   forward  MLP.net1   shapes (16), (8, 10), (10, 16)
                                     placements (Shard(0),), (Replicate(),), (Shard(1),)
    aten.addmm   forward  MLP.net1   the op on the local tensors that DTensor runs inside

Only a dispatch mode sees tensor ops. The hot path keeps references to small shared objects (an op,
a DTensor's spec); everything else is computed when the ops are read. No tensor is kept alive.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from commlens.model.trace import Phase, TracedOp
from commlens.tracing.attribution.module_calls import (
    FIRST_ACCUMULATION,
    ModuleCall,
    ModuleRow,
    current_node,
    current_pass,
)
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.op_names import (
    FUNCTIONAL,
    functional_scope,
    public_packet,
    split_name,
)
from commlens.tracing.attribution.recomputations import follow_recomputations, recomputes
from commlens.tracing.leave_to_eager import EagerMode, leave_to_eager
from commlens.tracing.patches import Patches
from commlens.tracing.raw_event import RawEvent

_SETTLE_AT = 50_000  # ten thousand ops
_PROPAGATION = "torch/distributed/tensor/_sharding_prop.py"
_SPECS_LIMIT = 1_000
_Tensor = torch.Tensor

Place = ModuleCall | tuple[Phase, str | None]
"""Where an op runs: the call in whose forward it runs, or the phase and path of a module."""
_OPTIMIZER: Place = (Phase.OPTIMIZER, None)
_OUTSIDE: Place = (Phase.OUTSIDE, None)


class ArgumentLayout(NamedTuple):
    """The shapes, placements and mesh of an op's DTensor arguments."""

    shapes: tuple[Any, ...]  # torch.Size each
    placements: tuple[Any, ...]  # a tuple of Placement each
    mesh: str


class OpRecord(NamedTuple):
    """One op in one place. All its runs there share the object."""

    op: Any  # OpOverload
    phase: Phase | None
    site: str | None
    layout: ArgumentLayout | None  # DTensor ops only
    shapes: tuple[Any, ...]  # of plain tensor arguments


class _OpSchema:
    """The facts about an op that its schema shows."""

    __slots__ = ("communicates", "is_tensor_op", "op", "packet", "run")

    def __init__(self, op: Any) -> None:
        self.op = op  # kept alive, since it is looked up by its id
        self.run = op._op if type(op) is OpOverload else op  # what an OpOverload calls in turn
        self.communicates = self.is_tensor_op = False
        self.packet = None  # of a functional collective: its c10d ops count under this one
        if isinstance(op, HigherOrderOperator):
            return
        names = {argument.name for argument in op._schema.arguments}
        namespace, _ = split_name(op._overloadpacket)
        self.is_tensor_op = namespace != "prim"  # such as a fake tensor's look-up of its device
        self.communicates = bool(names & {"group_name", "process_group"})
        self.packet = (
            public_packet(op._overloadpacket)
            if self.communicates and namespace in (*FUNCTIONAL, "_dtensor")
            else None
        )


_known: dict[int, _OpSchema] = {}  # by id of the op


class _ThreadNow:
    """What one thread runs now, and the place of its last op inside a backward."""

    __slots__ = (
        "issued",
        "last",
        "last_place",
        "optimizer_pass",
        "optimizer_steps",
        "recomputing",
    )

    def __init__(self) -> None:
        self.issued = 0  # collectives that the tap has reported
        self.optimizer_steps = 0  # that run, one inside the other
        # the backward pass inside whose hooks the innermost of them began; -1 outside of any
        self.optimizer_pass = -1
        # nodes that recompute a forward, each with its backward pass; the innermost is the last
        self.recomputing: list[tuple[int, int]] = []
        # Consecutive ops mostly run in one autograd node and module call: their place is kept.
        self.last: tuple[int, ModuleCall | None, bool] | None = None
        self.last_place: Place = _OUTSIDE


class _ThreadState(threading.local):
    def __init__(self) -> None:
        # one object, since looking up each attribute of a thread-local one is slow
        self.here = _ThreadNow()


class OpsMode(EagerMode):
    """Records ops while it is entered. It may be entered again after it was left, but not
    nested.
    """

    def __init__(
        self,
        modules: ModuleTracker,
        on_collective: list[Callable[[RawEvent], None]],
        *,
        shapes: bool = True,
    ) -> None:
        """Create a mode for a tracer with these modules and listeners. ``shapes``: keep the shapes
        of plain tensors too.
        """
        super().__init__()
        self.on_unissued: list[Callable[[Any, Phase | None, str | None], None]] = []
        """Called with packet, phase and path for communicating ops that issued nothing: on fake
        tensors, or on a backend that bypasses the dispatcher.
        """
        self.rows: dict[str, ModuleRow] = {}
        """Modules seen in backward, by path. Their forward may have run before the tracer started.
        """
        self._modules = modules
        self._on_collective = on_collective
        self._shapes = shapes
        # Five items an op: the op, its place, the specs of its DTensors or None, the shapes of its
        # plain tensors, the sequence number of the last collective before it. An object for each
        # op would keep the garbage collector busy.
        self._fresh: list[Any] = []
        self._settled: list[OpRecord] = []
        self._after = array("q")  # per record, the sequence number of the last collective before it
        self._records: dict[Any, OpRecord] = {}
        self._layouts: dict[Any, ArgumentLayout] = {}
        # by the specs' ids; with the specs, which stay alive so that no other one gets their ids
        self._layouts_of_specs: dict[tuple[int, ...], tuple[ArgumentLayout, Any]] = {}
        self._sequence = 0
        self._thread = _ThreadState()
        self._hooks: list[Any] = []
        self._patches = Patches()
        self._lock = threading.Lock()

    def __enter__(self) -> OpsMode:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._thread = _ThreadState()
        self._on_collective.append(self._issued)
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        follow_recomputations(self._patches, lambda: self._thread.here.recomputing)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._patches.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._on_collective.remove(self._issued)
        self._settle()
        self._layouts, self._layouts_of_specs = {}, {}
        self._thread = _ThreadState()

    def clear(self) -> None:
        """Discard all records."""
        with self._lock:
            self._settled, self._after, self._records = [], array("q"), {}
            self._fresh.clear()
            self._sequence = 0
            self.rows.clear()

    def records(self) -> list[OpRecord]:
        """Return all ops so far, in order."""
        self._settle()
        return self._settled

    def traced_ops(self) -> Iterator[TracedOp]:
        """Yield the same ops in the form of a trace."""
        printed = functools.cache(str)
        for record, after in zip(self.records(), self._after, strict=True):
            layout = record.layout
            shapes = layout.shapes if layout is not None else record.shapes
            yield TracedOp(
                name=str(record.op),
                before_sequence=after + 1,
                phase=record.phase,
                site=record.site,
                input_shapes=tuple(tuple(shape) for shape in shapes),
                input_placements=tuple(map(printed, layout.placements)) if layout else (),
                mesh=layout.mesh if layout else None,
            )

    # --- the hot path

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and record it. What DTensor runs on fake tensors to learn a shape is not of the
        program, so it is left out.
        """
        if DTensor in types:  # it runs first; the ops that it issues come here afterwards
            if not isinstance(func, HigherOrderOperator):
                self._fresh += (func, self._place(), _specs(args), (), self._sequence)
            return NotImplemented
        if AsyncCollectiveTensor in types:
            return NotImplemented  # the wait comes here next, then the op again
        kind = _known.get(id(func))
        if kind is None:
            kind = _known[id(func)] = _OpSchema(func)
        if kind.communicates:
            return self._run_collective(kind, args, kwargs or {})
        result = kind.run(*args, **kwargs) if kwargs else kind.run(*args)
        # the cheapest question first
        known_as_real = type(result) is _Tensor and not result.is_meta
        if kind.is_tensor_op and (known_as_real or not (_is_fake(result) and _in_propagation())):
            self._fresh += (func, self._place(), None, self._shapes_of(args), self._sequence)
        return result

    is_left_to_eager = leave_to_eager(__torch_dispatch__.__code__)

    def _shapes_of(self, args: Any) -> tuple[Any, ...]:
        return tuple([a.shape for a in args if isinstance(a, _Tensor)]) if self._shapes else ()

    def _run_collective(self, kind: _OpSchema, args: Any, kwargs: Any) -> Any:
        """Run and record an op that communicates. If the tap reports no collective meanwhile, tell
        the listeners of it: it issued none that could be seen.
        """
        scope, thread = functional_scope, self._thread.here
        noted = (kind.op, self._place(), None, self._shapes_of(args), self._sequence)
        issued, outer = thread.issued, scope.packet
        if kind.packet is not None:
            scope.packet = kind.packet
        try:
            result = kind.op(*args, **kwargs)
        finally:
            scope.packet = outer
        self._fresh += noted
        if thread.issued == issued:
            for listener in self.on_unissued:
                listener(kind.packet or kind.op._overloadpacket, *_phase_and_path(noted[1]))
        return result

    def _issued(self, event: RawEvent) -> None:
        self._thread.here.issued += 1
        self._sequence = event.sequence
        if len(self._fresh) > _SETTLE_AT:
            self._settle()

    # --- where an op runs

    def _place(self) -> Place:
        """Return where this thread's op runs."""
        stack, node, here = self._modules._thread.stack, current_node(), self._thread.here
        call = stack[-1] if stack else None
        if node is None:  # no backward runs on this thread
            return call or (_OPTIMIZER if here.optimizer_steps else _OUTSIDE)
        if here.optimizer_steps and here.optimizer_pass == current_pass():
            return _OPTIMIZER
        number = node._sequence_nr()
        recomputes = bool(here.recomputing) and here.recomputing[-1] == (number, current_pass())
        if not recomputes and torch.is_grad_enabled():
            # in a double backward, or in a recomputation that torch does not run
            recomputes = _in_checkpoint()
        now = number, call, recomputes
        if now != here.last:
            here.last_place = self._place_in_node(node, *now)
            # nodes that accumulate gradients share their number
            here.last = now if number < FIRST_ACCUMULATION else None
        return here.last_place

    def _place_in_node(
        self, node: Any, number: int, call: ModuleCall | None, recomputes: bool
    ) -> Place:
        """Return the place of an op inside an autograd node.

        Args:
            node: the node.
            number: its sequence number.
            call: this thread's innermost module call.
            recomputes: whether the node recomputes a forward.
        """
        phase, located = self._modules.locate_node(number, call)
        if recomputes and number < FIRST_ACCUMULATION:
            phase = Phase.RECOMPUTATION
        if located is None:
            return phase, self._modules.paths.accumulating_path(node)
        self.rows[located.row.path] = located.row
        return phase, located.row.path

    def _optimizer_begins(self, *_: Any) -> None:
        here = self._thread.here
        here.optimizer_steps += 1
        here.optimizer_pass = current_pass()

    def _optimizer_ended(self, *_: Any) -> None:
        here = self._thread.here
        here.optimizer_steps = max(0, here.optimizer_steps - 1)

    # --- turning the hot path's items into records

    def _settle(self) -> None:
        """Turn what the hot path has noted into records, and forget it."""
        with self._lock:
            count = len(self._fresh)  # another thread may append meanwhile
            items = iter(self._fresh[:count])
            for op, place, specs, shapes, after in zip(
                items, items, items, items, items, strict=True
            ):
                phase, path = _phase_and_path(place)
                layout = self._layout_of(specs) if specs is not None else None
                # enums and ops are slow to hash; the record keeps them alive
                key = (id(op), id(phase), path, id(layout), shapes)
                record = self._records.get(key)
                if record is None:
                    record = self._records[key] = OpRecord(op, phase, path, layout, shapes)
                self._settled.append(record)
                self._after.append(after)
            del self._fresh[:count]

    def _layout_of(self, specs: tuple[Any, ...]) -> ArgumentLayout:
        """Return the layout of an op's DTensors, whose specs are mostly known."""
        key = tuple([id(spec) for spec in specs])
        known = self._layouts_of_specs.get(key)
        if known is None:
            if len(self._layouts_of_specs) >= _SPECS_LIMIT:
                self._layouts_of_specs = {}
            known = self._layouts_of_specs[key] = (self._layout(specs), specs)
        return known[0]

    def _layout(self, specs: tuple[Any, ...]) -> ArgumentLayout:
        """Return the layout that specs describe, one object for all that are alike."""
        shapes = tuple(getattr(spec.tensor_meta, "shape", torch.Size()) for spec in specs)
        placements = tuple(spec.placements for spec in specs)
        mesh = specs[-1].mesh if specs else None
        key = (shapes, placements, mesh)
        if key not in self._layouts:
            printed = str(mesh) if mesh is not None else ""
            self._layouts[key] = ArgumentLayout(shapes, placements, printed)
        return self._layouts[key]


def _phase_and_path(place: Place) -> tuple[Phase, str | None]:
    if isinstance(place, tuple):
        return place
    return (Phase.FORWARD if place.recomputed_by is None else Phase.RECOMPUTATION), place.row.path


def _specs(args: Any) -> tuple[Any, ...]:
    """Return the specs of an op's DTensors, also of those in lists, as of ``torch.cat``."""
    found = []
    for argument in args:
        if isinstance(argument, DTensor):
            found.append(argument._spec)
        elif type(argument) in (list, tuple):
            found.extend([item._spec for item in argument if isinstance(item, DTensor)])
    return tuple(found)


def _is_fake(result: Any) -> bool:
    first = result[0] if type(result) in (tuple, list) and result else result
    return isinstance(first, _Tensor) and (first.is_meta or isinstance(first, FakeTensor))


def _in_propagation() -> bool:
    """Check whether DTensor runs a new op on fake tensors to learn its result's shape."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_PROPAGATION):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _in_checkpoint() -> bool:
    """Check whether a checkpointed function is being recomputed, and no backward runs inside it."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if recomputes(code):
            return True
        if code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
