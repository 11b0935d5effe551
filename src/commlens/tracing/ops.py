"""Depth ``ops``: every tensor op with where it ran, and of DTensor ops the placements.

A dispatch mode, since only that sees tensor ops. The hot path keeps references to what is small and shared (an op, a DTensor's
spec); what has to be worked out or printed waits until somebody reads. Nothing keeps a tensor alive.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from commlens.model.trace import Phase, TracedOp
from commlens.tracing.modules import ModuleCall, current_node
from commlens.tracing.packets import FUNCTIONAL, public_packet, split_name

if TYPE_CHECKING:
    from commlens.tracing.modules import ModuleRow
    from commlens.tracing.tracer import RawEvent, Tracer

_SETTLE_AT = 50_000  # ten thousand ops
_CHECKPOINT = "torch/utils/checkpoint.py"
_PROPAGATION = "torch/distributed/tensor/_sharding_prop.py"
_BACKWARD, _RECOMPUTATION, _OPTIMIZER, _OUTSIDE = Phase.BACKWARD, Phase.RECOMPUTATION, Phase.OPTIMIZER, Phase.OUTSIDE
_Tensor = torch.Tensor
_NOWHERE = -2
_KEPT = 2**63  # numbers from here on do not tell nodes apart: gradients' accumulation


class Layout(NamedTuple):
    """How the DTensor arguments of an op lay on their mesh."""

    shapes: tuple[Any, ...]  # torch.Size each
    placements: tuple[Any, ...]  # a tuple of Placement each
    mesh: str


class OpRecord(NamedTuple):
    """One op in one place, once its layout has been worked out. The same object for each time that it ran there."""

    op: Any  # OpOverload
    phase: Phase | None
    site: str | None
    layout: Layout | None  # DTensor ops only
    shapes: tuple[Any, ...]  # of plain tensor arguments


class _Op:
    """What is known of an op by its schema."""

    __slots__ = ("communicates", "is_tensor_op", "op", "packet")

    def __init__(self, op: Any) -> None:
        self.op = op  # held, since it is looked up by its id
        self.communicates = self.is_tensor_op = False
        self.packet = None
        if isinstance(op, HigherOrderOperator):
            return
        names = {argument.name for argument in op._schema.arguments}
        namespace, _ = split_name(op._overloadpacket)
        self.is_tensor_op = namespace != "prim"  # a fake tensor asks for its device so
        self.communicates = bool(names & {"group_name", "process_group"})
        # What is issued inside counts under this packet.
        self.packet = public_packet(op._overloadpacket) if self.communicates and namespace in (*FUNCTIONAL, "_dtensor") else None


_known: dict[int, _Op] = {}


class _Here(threading.local):
    """A thread's state, and where it was when it was last looked up: consecutive ops mostly run in one place."""

    issued = 0  # collectives that the tap has told of
    optimizers = 0  # optimizer steps under way
    call: Any = None
    number = _NOWHERE
    place: Any = None


def _leave_to_eager(code: Any) -> bool:
    """Let dynamo pass over a function and all that it calls. False where this torch has no such switch."""
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        return False
    return True


def _dispatch(self: OpsMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The mode's ``__torch_dispatch__``."""
    if DTensor in types:
        # DTensor runs first; what it issues comes here afterwards.
        if not isinstance(func, HigherOrderOperator):
            self._fresh += (func, self._place(), _specs(args), (), self._sequence)
        return NotImplemented
    if AsyncCollectiveTensor in types:
        return NotImplemented  # which shows the wait, and the op once more
    kind = _known.get(id(func))
    if kind is None:
        kind = _known[id(func)] = _Op(func)
    if kind.communicates:
        return self._run_collective(kind, args, kwargs or {})
    result = func(*args, **kwargs) if kwargs else func(*args)
    if kind.is_tensor_op and not (_is_fake(result) and _in_propagation()):
        shapes = tuple([a.shape for a in args if isinstance(a, _Tensor)]) if self._shapes else ()
        self._fresh += (func, self._place(), None, shapes, self._sequence)
    return result


_SKIPPED = _leave_to_eager(_dispatch.__code__)


class OpsMode(TorchDispatchMode):  # type: ignore[misc]
    """Records ops while it is entered. One object may be entered again, one level at a time."""

    supports_higher_order_operators = True

    def __init__(self, tracer: Tracer, *, shapes: bool = True) -> None:
        """Make a mode.

        Args:
            tracer: tells where the thread is, and of collectives.
            shapes: keep the shapes of plain tensors, too.
        """
        super().__init__()
        self.on_unissued: list[Callable[[Any, Phase | None, str | None], None]] = []
        """Called with packet, phase and path for ops of the communicating kind that issued nothing: on fake tensors, or on a
        backend that the dispatcher does not know of."""
        self.rows: dict[str, ModuleRow] = {}
        """Modules whose backward was seen, by path: their forward may have been before the tracer started."""
        self._tracer = tracer
        self._modules = tracer.modules
        self._shapes = shapes
        self._fresh: list[Any] = []  # five things for each op in turn: objects of its own would keep the garbage collector busy
        self._settled: list[OpRecord] = []
        self._after = array("q")  # for each of them the sequence number of the last collective before it
        self._records: dict[Any, OpRecord] = {}
        self._layouts: dict[Any, Layout] = {}
        self._meshes: dict[int, tuple[Any, str]] = {}
        self._sequence = 0
        self._here = _Here()
        self._hooks: list[Any] = []
        self._scope: Any = None
        self._lock = threading.Lock()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch 2.9 and later: leave torch.compile alone."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not _SKIPPED  # torch's own way costs more

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Torch before that asks this before it compiles under a mode."""
        return True

    def __enter__(self) -> OpsMode:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        from commlens.tracing.tracer import functional_scope

        self._scope = functional_scope
        self._here = _Here()
        self._tracer.on_collective.append(self._issued)
        self._hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._tracer.on_collective.remove(self._issued)
        self._settle()
        self._meshes = {}
        self._here = _Here()

    def clear(self) -> None:
        """Forget what was recorded."""
        with self._lock:
            self._settled, self._after, self._records = [], array("q"), {}
            self._fresh.clear()
            self.rows.clear()

    def records(self) -> list[OpRecord]:
        """All ops until now, in order."""
        self._settle()
        return self._settled

    def traced_ops(self) -> Iterator[TracedOp]:
        """The same as part of a trace."""
        placements: dict[int, str] = {}
        for record, after in zip(self.records(), self._after, strict=True):
            layout = record.layout
            yield TracedOp(
                name=str(record.op),
                before_sequence=after + 1,
                phase=record.phase,
                site=record.site,
                input_shapes=tuple(tuple(shape) for shape in (layout.shapes if layout else record.shapes)),
                input_placements=_printed(layout, placements) if layout else (),
                mesh=layout.mesh if layout else None,
            )

    # --- the hot path

    __torch_dispatch__ = _dispatch

    def _run_collective(self, kind: _Op, args: Any, kwargs: Any) -> Any:
        scope, here = self._scope, self._here
        place = self._place()
        shapes = tuple([a.shape for a in args if isinstance(a, _Tensor)]) if self._shapes else ()
        entry = (kind.op, place, None, shapes, self._sequence)
        issued, outer = here.issued, scope.packet
        if kind.packet is not None:
            scope.packet = kind.packet
        try:
            result = kind.op(*args, **kwargs)
        finally:
            scope.packet = outer
        self._fresh += entry
        if here.issued == issued:
            for listener in self.on_unissued:
                listener(kind.packet or kind.op._overloadpacket, *_phase_and_path(place))
        return result

    def _issued(self, event: RawEvent) -> None:
        self._here.issued += 1
        self._sequence = event.sequence
        if len(self._fresh) > _SETTLE_AT:
            self._settle()

    # --- where an op runs

    def _place(self) -> Any:
        """Where this thread is: a call, or else what ``_phase_and_path`` makes of it."""
        stack, node = self._modules._here.stack, current_node()
        if node is None:
            return stack[-1] if stack else _OPTIMIZER if self._here.optimizers else _OUTSIDE
        here = self._here
        call = stack[-1] if stack else None
        number = node._sequence_nr()
        recording = torch.is_grad_enabled()  # in backward: a forward that runs again, or a backward of the backward
        if number == here.number and call is here.call and not recording:
            return here.place
        phase, located = self._modules.locate()
        path = None
        if located is not None:
            path = located.row.path
            self.rows[path] = located.row
        here.number, here.call = number, call
        if phase is _BACKWARD:
            if number > _KEPT:
                here.number = _NOWHERE
                path = path or self._path_of_accumulation(node)
            elif recording:
                here.number = _NOWHERE
                if _in_checkpoint():
                    phase = _RECOMPUTATION
        place = here.place = (phase, path)
        return place

    def _path_of_accumulation(self, node: Any) -> str | None:
        """The module whose parameter's gradient is being accumulated."""
        parameter = getattr(node, "variable", None)
        path = self._tracer.modules.parameter_path(parameter) if parameter is not None else None
        return path.rpartition(".")[0] if path is not None else None

    def _optimizer_begins(self, *_: Any) -> None:
        self._here.optimizers += 1

    def _optimizer_ended(self, *_: Any) -> None:
        self._here.optimizers = max(0, self._here.optimizers - 1)

    # --- from what the hot path leaves to what can be read

    def _settle(self) -> None:
        with self._lock:
            count = len(self._fresh)  # another thread may append meanwhile
            items = iter(self._fresh[:count])
            for op, place, specs, shapes, after in zip(items, items, items, items, items, strict=True):
                phase, path = _phase_and_path(place)
                layout = self._layout(specs) if specs is not None else None
                key = (op, phase, path, id(layout), shapes)
                record = self._records.get(key)
                if record is None:
                    record = self._records[key] = OpRecord(op, phase, path, layout, shapes)
                self._settled.append(record)
                self._after.append(after)
            del self._fresh[:count]

    def _layout(self, specs: tuple[Any, ...]) -> Layout:
        shapes = tuple(getattr(spec.tensor_meta, "shape", torch.Size()) for spec in specs)
        placements = tuple(spec.placements for spec in specs)
        mesh = specs[-1].mesh if specs else None
        key = (shapes, placements, id(mesh))
        layout = self._layouts.get(key)
        if layout is None or (mesh is not None and self._meshes.get(id(mesh), (None,))[0] is not mesh):
            if mesh is not None:
                self._meshes[id(mesh)] = (mesh, str(mesh))
            layout = self._layouts[key] = Layout(shapes, placements, str(mesh) if mesh is not None else "")
        return layout


def _phase_and_path(place: Any) -> tuple[Phase | None, str | None]:
    if type(place) is ModuleCall:
        return (Phase.FORWARD if place.run_by is None else _RECOMPUTATION), place.row.path
    return place if type(place) is tuple else (place, None)


def _specs(args: Any) -> tuple[Any, ...]:
    found = []
    for argument in args:
        if isinstance(argument, DTensor):
            found.append(argument._spec)
        elif type(argument) in (list, tuple):
            found.extend([item._spec for item in argument if isinstance(item, DTensor)])
    return tuple(found)


def _printed(layout: Layout, known: dict[int, str]) -> tuple[str, ...]:
    for placements in layout.placements:
        if id(placements) not in known:
            known[id(placements)] = str(placements)
    return tuple(known[id(placements)] for placements in layout.placements)


def _is_fake(result: Any) -> bool:
    first = result[0] if type(result) in (tuple, list) and result else result
    return isinstance(first, _Tensor) and (first.is_meta or isinstance(first, FakeTensor))


def _in_propagation() -> bool:
    """Whether DTensor runs an op on fake tensors to learn the shape of its result: once for each new op, and no part of the program."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_PROPAGATION):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _in_checkpoint() -> bool:
    """Whether a function that activation checkpointing runs again called us, and not a backward inside of it."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_CHECKPOINT):
            return code.co_name in ("recompute_fn", "backward", "unpack_hook")
        if code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
