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
_BACKWARD, _RECOMPUTATION, _OPTIMIZER, _OUTSIDE = (
    Phase.BACKWARD,
    Phase.RECOMPUTATION,
    Phase.OPTIMIZER,
    Phase.OUTSIDE,
)
_Tensor = torch.Tensor
_NO_NODE = -2
_SPECS_LIMIT = 1_000

Place = ModuleCall | Phase | tuple[Phase, str | None]
"""Where an op runs: the call in whose forward it runs, a phase outside of all modules, or the phase
and path of a module. The hot path takes what it has at hand; ``_phase_and_path`` makes a phase and
a path of each.
"""


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
        "last_call",
        "last_node",
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
        self.last_node = _NO_NODE
        self.last_call: ModuleCall | None = None
        self.last_place: Place = _OUTSIDE


class _ThreadState(threading.local):
    def __init__(self) -> None:
        # one object, since looking up each attribute of a thread-local one is slow
        self.here = _ThreadNow()


def _dispatch(self: OpsMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an op and record it: the mode's ``__torch_dispatch__``. What DTensor runs on fake tensors
    to learn a shape is not of the program, so it is left out.
    """
    if DTensor in types:
        return self._leave_to_dtensors(func, args)
    if AsyncCollectiveTensor in types:
        return NotImplemented  # the wait comes here next, then the op again
    kind = _known.get(id(func))
    if kind is None:
        kind = _known[id(func)] = _OpSchema(func)
    if kind.communicates:
        return self._run_collective(kind, args, kwargs or {})
    result = kind.run(*args, **kwargs) if kwargs else kind.run(*args)
    known_as_real = type(result) is _Tensor and not result.is_meta  # the cheapest question first
    if kind.is_tensor_op and (known_as_real or not (_is_fake(result) and _in_propagation())):
        shapes = tuple([a.shape for a in args if isinstance(a, _Tensor)]) if self._shapes else ()
        self._fresh += (func, self._place(), None, shapes, self._sequence)
    return result


class OpsMode(EagerMode):
    """Records ops while it is entered. It may be entered again after it was left, but not
    nested.
    """

    is_left_to_eager = leave_to_eager(_dispatch.__code__)

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
        self._backward_places: dict[ModuleRow, tuple[Phase, str]] = {}
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
        self._meshes: dict[int, Any] = {}  # by id: the meshes that the layouts are of, kept alive
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
        self._meshes = {}
        self._layouts_of_specs = {}
        self._thread = _ThreadState()

    def clear(self) -> None:
        """Discard all records."""
        with self._lock:
            self._settled, self._after, self._records = [], array("q"), {}
            self._fresh.clear()
            self._sequence = 0
            self.rows.clear()
            self._backward_places.clear()

    def records(self) -> list[OpRecord]:
        """Return all ops so far, in order."""
        self._settle()
        return self._settled

    def traced_ops(self) -> Iterator[TracedOp]:
        """Yield the same ops in the form of a trace."""
        placements: dict[int, str] = {}
        for record, after in zip(self.records(), self._after, strict=True):
            layout = record.layout
            yield TracedOp(
                name=str(record.op),
                before_sequence=after + 1,
                phase=record.phase,
                site=record.site,
                input_shapes=tuple(
                    tuple(shape) for shape in (layout.shapes if layout else record.shapes)
                ),
                input_placements=_printed(layout, placements) if layout else (),
                mesh=layout.mesh if layout else None,
            )

    # --- the hot path

    __torch_dispatch__ = _dispatch

    def _leave_to_dtensors(self, func: Any, args: Any) -> Any:
        """Record an op of DTensors, which run first; the ops that they issue come here
        afterwards.
        """
        if not isinstance(func, HigherOrderOperator):
            self._fresh += (func, self._place(), _specs(args), (), self._sequence)
        return NotImplemented

    def _run_collective(self, kind: _OpSchema, args: Any, kwargs: Any) -> Any:
        """Run and record an op that communicates. If the tap reports no collective meanwhile, tell
        the listeners of it: it issued none that could be seen.
        """
        scope, thread = functional_scope, self._thread.here
        place = self._place()
        shapes = tuple([a.shape for a in args if isinstance(a, _Tensor)]) if self._shapes else ()
        before = self._sequence
        issued, outer = thread.issued, scope.packet
        if kind.packet is not None:
            scope.packet = kind.packet
        try:
            result = kind.op(*args, **kwargs)
        finally:
            scope.packet = outer
        self._fresh += (kind.op, place, None, shapes, before)
        if thread.issued == issued:
            for listener in self.on_unissued:
                listener(kind.packet or kind.op._overloadpacket, *_phase_and_path(place))
        return result

    def _issued(self, event: RawEvent) -> None:
        self._thread.here.issued += 1
        self._sequence = event.sequence
        if len(self._fresh) > _SETTLE_AT:
            self._settle()

    # --- where an op runs

    def _place(self) -> Place:
        """Return where this thread's op runs. In a backward pass, consecutive ops of one autograd
        node and module call share the answer.
        """
        stack, node, here = self._modules._thread.stack, current_node(), self._thread.here
        call = stack[-1] if stack else None
        if node is None:  # no backward runs on this thread
            return call or (_OPTIMIZER if here.optimizer_steps else _OUTSIDE)
        if here.optimizer_steps and here.optimizer_pass == torch._C._current_graph_task_id():
            return _OPTIMIZER
        number = node._sequence_nr()
        recomputing = bool(here.recomputing) and here.recomputing[-1] == (number, current_pass())
        # Gradients are recorded in a double backward, and in a recomputation that torch does not
        # run: the stack tells these two apart.
        if recomputing or torch.is_grad_enabled():
            here.last_node = _NO_NODE
            return self._place_in_node(node, number, call, recomputing or None)
        if number != here.last_node or call is not here.last_call:
            here.last_place = self._place_in_node(node, number, call, recomputing)
            # nodes that accumulate gradients share their number
            here.last_node = number if number < FIRST_ACCUMULATION else _NO_NODE
            here.last_call = call
        return here.last_place

    def _place_in_node(
        self, node: Any, number: int, call: ModuleCall | None, recomputing: bool | None
    ) -> Place:
        """Return the place of an op inside an autograd node.

        Args:
            node: the node.
            number: its sequence number.
            call: this thread's innermost module call.
            recomputing: whether the node recomputes a forward; None if only the stack shows it.
        """
        phase, located = self._modules.locate_node(number, call)
        if phase is _BACKWARD and number < FIRST_ACCUMULATION and recomputing is not False:
            phase = _RECOMPUTATION if recomputing or _in_checkpoint() else _BACKWARD
        if located is None:
            return phase, self._modules.paths.accumulating_path(node)
        return self._place_of(phase, located.row)

    def _place_of(self, phase: Phase, row: ModuleRow) -> tuple[Phase, str]:
        known = self._backward_places.get(row) if phase is _BACKWARD else None
        if known is not None:
            return known
        self.rows[row.path] = row
        place = (phase, row.path)
        if phase is _BACKWARD:
            self._backward_places[row] = place
        return place

    def _optimizer_begins(self, *_: Any) -> None:
        here = self._thread.here
        here.optimizer_steps += 1
        here.optimizer_pass = torch._C._current_graph_task_id()

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
        key = (shapes, placements, id(mesh))
        layout = self._layouts.get(key)
        if layout is None or self._meshes.get(id(mesh)) is not mesh:  # else a reused id
            self._meshes[id(mesh)] = mesh
            layout = self._layouts[key] = ArgumentLayout(
                shapes, placements, str(mesh) if mesh is not None else ""
            )
        return layout


def _phase_and_path(place: Place) -> tuple[Phase | None, str | None]:
    if isinstance(place, ModuleCall):
        return (Phase.FORWARD if place.recomputed_by is None else _RECOMPUTATION), place.row.path
    return place if isinstance(place, tuple) else (place, None)


def _specs(args: Any) -> tuple[Any, ...]:
    """Return the specs of an op's DTensors, also of those in lists, as of ``torch.cat``."""
    found = []
    for argument in args:
        if isinstance(argument, DTensor):
            found.append(argument._spec)
        elif type(argument) in (list, tuple):
            found.extend([item._spec for item in argument if isinstance(item, DTensor)])
    return tuple(found)


def _printed(layout: ArgumentLayout, known: dict[int, str]) -> tuple[str, ...]:
    for placements in layout.placements:
        if id(placements) not in known:
            known[id(placements)] = str(placements)
    return tuple(known[id(placements)] for placements in layout.placements)


def _is_fake(result: Any) -> bool:
    first = result[0] if type(result) in (tuple, list) and result else result
    return isinstance(first, _Tensor) and (first.is_meta or isinstance(first, FakeTensor))


def _in_propagation() -> bool:
    """Check whether DTensor runs a new op on fake tensors to learn its result's shape."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_PROPAGATION):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _in_checkpoint() -> bool:
    """Check whether a checkpointed function is being recomputed, and no backward runs inside it."""
    frame = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        if recomputes(code):
            return True
        if code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
