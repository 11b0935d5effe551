"""Record every op of a step, with hashes of all that it reads and writes (``check_numbers:
every-op``).

``F.linear(x, weight, bias)`` in a module ``fc`` becomes ``OpRun("aten.addmm.default", arguments,
inputs=(<hash of bias>, <of x>, <of weight>), outputs=(<of the result>,), writes=(), place=4)``,
where place 4 is ``OpPlace("fc", source="train.py:81")``. An op that writes to a known tensor, such
as an optimizer's ``add_``, has the tensor's new hash in ``writes``. Hashes are computed on the
device; until the end of the step, an op has only their positions in a list.

A dispatch mode of the thread that trains sees the ops, also those of backward passes. It stays
entered, because modes must be left in the order in which they were entered, and passes ops on
between the steps that are recorded. Under such a mode, torch runs compiled code eagerly.

Tried with torch 2.13: an op's node in the autograd graph has the sequence number before the
present one.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from commlens.model.cause import TensorKind
from commlens.model.grouping import grouped
from commlens.model.numbers import CheckId, OpLog, OpPlace, OpRun
from commlens.numbers.comparison import EVERY_OP
from commlens.numbers.exchange import Exchange
from commlens.numbers.inspection import Inspection, tensors_to_check
from commlens.numbers.measuring import Named, hash_without_nan, reason_to_skip
from commlens.numbers.model_inputs import is_training
from commlens.numbers.replicas import Model, find_roots, module_names
from commlens.tap.running_frames import user_line

log = logging.getLogger("commlens")

RUNS_MAX: Final = 100_000
"""Ops of one step; a longer step is not compared."""

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_UNFILLED: Final = ("empty", "new_empty", "_empty", "resize", "set_", "record_stream")
_NAMED: Final[tuple[TensorKind, ...]] = ("parameter", "buffer", "optimizer-state")
# their further outputs are scratch memory
_WITH_SCRATCH: Final = ("rnn", "flash", "efficient", "cudnn", "miopen", "fused_sdp")


class _Run(NamedTuple):
    """An op, with the positions of its hashes. Known tensors have numbers."""

    op: str
    arguments: tuple[str, ...]
    inputs: list[int]
    outputs: list[int]
    reads: dict[int, int]  # by known tensor
    writes: dict[int, int]  # by known tensor
    module: Any  # in which it runs; None: in none
    place: OpPlace  # without the module's name


@functools.cache
class _OpFacts:
    """The facts about an op that its schema shows."""

    def __init__(self, op: Any) -> None:
        name = op._schema.name.partition("::")[2]
        self.name = name.strip("_")
        self.is_collective = op.namespace in _COLLECTIVES
        self.is_view = bool(op.is_view)
        self.is_random = torch.Tag.nondeterministic_seeded in op.tags
        self.is_function = (
            op.namespace == "aten"
            and not name.startswith(_UNFILLED)
            and getattr(torch.Tag, "nondeterministic_bitwise", None) not in op.tags
        )
        self.outputs = 1 if any(each in name for each in _WITH_SCRATCH) else None
        self._names = [each.name for each in op._schema.arguments]
        self._writes = [
            each.name
            for each in op._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        ]
        if op.namespace == "c10d":  # its schemas do not tell
            outputs = [each for each in self._names if each.startswith("output")]
            self._writes = outputs or self._names

    def argument(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return an argument by its name in the schema; None if it was not passed."""
        index = self._names.index(name) if name in self._names else len(args)
        return args[index] if index < len(args) else kwargs.get(name)

    def written(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the arguments that the op writes to."""
        return _tensors([self.argument(name, args, kwargs) for name in self._writes])


class _KnownTensors:
    """The named tensors of a step. Each has a number."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        self.by_number = [
            each
            for each in tensors
            if reason_to_skip(each.tensor) is None and each.tensor.is_contiguous()
        ]
        self._by_storage = grouped(
            (_storage(each.tensor), (number, *_span(each.tensor)))
            for number, each in enumerate(self.by_number)
        )
        self._left_out: set[int] = set()

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Find no known tensor any more that shares memory with one of these."""
        self._left_out.update(self.find(tensors))

    def find(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Return the numbers of the known tensors that share memory with one of these."""
        found: set[int] = set()
        for each in tensors:
            begin, end = _span(each)
            found.update(
                number
                for number, first, last in self._by_storage.get(_storage(each), ())
                if begin < last and first < end
            )
        return sorted(found - self._left_out)


class _RecordedStep:
    """The ops of a step, as far as it has run."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        self.runs: list[_Run] = []
        self._hashes: list[torch.Tensor] = []
        self._forward_places: dict[int, tuple[Any, str]] = {}  # by the number of a backward node
        self._after = ""  # the last collective
        self._known = _KnownTensors(tensors)
        self._initial = [self._hash(each.tensor) for each in self._known.by_number]

    def before(self, op: Any, args: Any, kwargs: Any, module: Any) -> _Run | None:
        """Return an op with the hashes of its inputs; None if there is nothing to compare."""
        facts = _OpFacts(op)
        if facts.is_view:
            return None
        module, place = self._place(module)
        if facts.is_collective:
            self._after = f"{facts.name} at {place.source}" if place.source else facts.name
            # it writes them at a time of its own
            self._known.leave_out(facts.written(args, kwargs))
            return None
        tensors = _tensors((args, kwargs))
        inputs = [self._hash(each) for each in tensors] if facts.is_function else []
        if facts.is_random:
            device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
            generator = facts.argument("generator", args, kwargs) or _default_generator(device)
            inputs.append(self._hash(generator.get_state()))
        arguments, reads = _described((args, kwargs)), self._hash_known(tensors)
        return _Run(str(op), arguments, inputs, [], reads, {}, module, place)

    def after(self, run: _Run, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an op that has run, with the hashes of its outputs."""
        facts = _OpFacts(op)
        written = facts.written(args, kwargs)
        if facts.is_function:
            outputs = written or _tensors(result)
            run.outputs.extend(self._hash(each) for each in outputs[: facts.outputs])
        run.writes.update(self._hash_known(written))
        if run.outputs or run.writes or run.reads:
            self.runs.append(run)

    def log(self, names: Mapping[int, str]) -> OpLog:
        """Return the ops, and the places where they ran. Waits for the devices.

        Args:
            names: of the modules, by id.
        """
        hashes = _read(self._hashes)
        places: dict[OpPlace, int] = {}
        runs: list[OpRun] = []
        # hash of each known tensor, as an op left it
        last = dict(enumerate(hashes[position] for position in self._initial))

        def change_of(number: int) -> tuple[TensorKind, str, int]:
            named = self._known.by_number[number]
            return named.kind, named.name, last[number]

        for run in self.runs:
            name = type(run.module).__name__ if run.module is not None else ""
            at = replace(run.place, module=names.get(id(run.module), name))
            place = places.setdefault(at, len(places))
            for number, position in run.reads.items():
                if last[number] != hashes[position]:  # other code has written to it
                    last[number] = hashes[position]
                    runs.append(OpRun("", (), (), (), (change_of(number),), place))
            last.update((number, hashes[position]) for number, position in run.writes.items())
            inputs, outputs = (
                tuple(hashes[position] for position in positions)
                for positions in (run.inputs, run.outputs)
            )
            writes = tuple(map(change_of, run.writes))
            runs.append(OpRun(run.op, run.arguments, inputs, outputs, writes, place))
        return OpLog(tuple(places), tuple(runs))

    def _place(self, module: Any) -> tuple[Any, OpPlace]:
        """Return the module and the place where an op runs; in a backward pass, those of its
        forward pass.
        """
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            module, line = self._forward_places.get(node._sequence_nr(), (None, ""))
            return module, OpPlace("", True, line or user_line(sys._getframe(2)), self._after)
        line = user_line(sys._getframe(2))
        if module is not None and torch.is_grad_enabled():
            number = torch._C._autograd._get_sequence_nr() - 1
            # later ops without a node of their own see the same number
            self._forward_places.setdefault(number, (module, line))
        return module, OpPlace("", False, line, self._after)

    def _hash(self, tensor: torch.Tensor) -> int:
        """Return the position of a tensor's hash, which the device may still compute."""
        self._hashes.append(hash_without_nan(tensor))
        return len(self._hashes) - 1

    def _hash_known(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Return the hashes of the known tensors that share memory with one of these."""
        known = self._known
        return {
            number: self._hash(known.by_number[number].tensor) for number in known.find(tensors)
        }


class OpWatch(TorchDispatchMode):  # type: ignore[misc]
    """Sees the ops of this thread, and records those of one step after another. An error ends it,
    and is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.too_many = False  # ops in this step
        self.on_forward: Callable[[Any], None] | None = None
        """Is called before a module runs that is trained."""
        self._step: _RecordedStep | None = None  # None: nothing is recorded
        self._pid = os.getpid()
        self._modules: list[Any] = []  # that run, the innermost last

    def install(self) -> None:
        """Enter the mode. Must be called while no other dispatch mode is entered.

        Raises:
            RuntimeError: one is.
        """
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("every-op cannot begin inside of another dispatch mode")
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        self.__enter__()

    def start(self, tensors: Iterable[Named]) -> None:
        """Begin a step, in which these tensors are known by name."""
        self._step, self.too_many = None, False
        self._step = _RecordedStep(tensors) if self.error is None else None

    def take(self, names: Mapping[int, str]) -> OpLog:
        """End the step, and return its ops. Waits for the devices.

        Args:
            names: of the modules, by id.
        """
        step, self._step = self._step, None
        return step.log(names) if step is not None else OpLog((), ())

    def stop(self) -> None:
        """Record nothing any more, and let go of all tensors."""
        self.on_forward = self._step = None

    def _enter(self, module: Any, _inputs: Any) -> None:
        self._modules.append(module)
        if self.on_forward is not None and torch.is_grad_enabled():
            self.on_forward(module)

    def _leave(self, module: Any, _inputs: Any, _output: Any) -> None:
        while self._modules and self._modules.pop() is not module:
            pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and record it."""
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # the tensors that it is made of come next
        kwargs, step = kwargs or {}, self._step
        if step is None or os.getpid() != self._pid:
            return func(*args, **kwargs)
        module = self._modules[-1] if self._modules else None
        run = self._safely(step.before, func, args, kwargs, module)
        result = func(*args, **kwargs)
        if run is not None and self._step is step:
            self._safely(step.after, run, func, args, kwargs, result)
            if len(step.runs) > RUNS_MAX:
                self.too_many, self._step = True, None
        return result

    def _safely(self, method: Callable[..., _Run | None], *args: Any) -> _Run | None:
        try:
            return method(*args)
        except Exception as error:
            self.error, self._step = error, None
            return None


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return torch.default_generator
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [
        each for each in torch.utils._pytree.tree_leaves(values) if reason_to_skip(each) is None
    ]


def _described(values: Any) -> tuple[str, ...]:
    """Return the arguments of an op, with a tensor's layout in place of its values."""
    return tuple(
        f"{str(each.dtype)[6:]}{list(each.shape)} {each.stride()} {each.data_ptr() % 64}"
        if reason_to_skip(each) is None
        else repr(each)
        if isinstance(each, (bool, int, float, complex, str, torch.dtype, torch.device, type(None)))
        else type(each).__name__
        for each in torch.utils._pytree.tree_leaves(values)
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first element, and behind its last."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    last: int = sum((size - 1) * stride for size, stride in sizes_and_strides)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _read(hashes: Sequence[torch.Tensor]) -> list[int]:
    """Return hashes as numbers, in their order."""
    by_device = grouped((each.device, index) for index, each in enumerate(hashes))
    found = [0] * len(hashes)
    for indices in by_device.values():
        values = torch.stack([hashes[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            found[index] = value
    return found


class OpChecks:
    """The ops of the steps of the first optimizer."""

    def __init__(self) -> None:
        self._watch = OpWatch()
        self._models: Sequence[Model] = ()
        self._before: Inspection | None = None  # the named tensors when the step began
        self._has_warned = False

    def install(self, on_first: Callable[[Callable[[Any], None], Any], None]) -> None:
        """See all ops from now on, and record those from the first forward pass on.

        Args:
            on_first: calls a function with a module, and lets no exception out.
        """
        self._watch.install()
        self._watch.on_forward = lambda module: on_first(self._begin_first, module)

    def _begin_first(self, module: Any) -> None:
        is_trained = any(each.requires_grad for each in module.parameters())
        if is_training(module) and is_trained:
            self._watch.on_forward = None
            self.begin([Model(find_roots(module.parameters()))], ())

    def begin(self, models: Sequence[Model], optimizers: Iterable[Any]) -> None:
        """Record the ops from now on."""
        self._models = models
        states = list(optimizers) or [None]
        tensors: list[Named] = []
        for model in models:
            for optimizer in states:
                is_first = optimizer is states[0]
                some = tensors_to_check(model, optimizer, buffers=is_first)
                kinds = _NAMED if is_first else ("optimizer-state",)
                tensors += [each for each in some if each.kind in kinds]
        self._before = Inspection(tensors, nans=False)
        self._watch.start(tensors)

    def stop(self) -> None:
        """Record nothing any more."""
        self._watch.stop()
        self._before = None

    def end(self, step: int, exchange: Exchange | None) -> None:
        """Send the ops that were recorded in a step."""
        self._watch.on_forward = None
        before, self._before = self._before, None
        roots = [root for model in self._models for root in model.alive()]
        ops = self._watch.take(module_names(roots))
        if self._watch.error is not None:
            raise self._watch.error
        if self._watch.too_many and not self._has_warned:
            self._has_warned = True
            log.warning(
                "commlens: step %s has more than %s ops; those steps are not compared op by op",
                step,
                RUNS_MAX,
            )
        if before is not None and exchange is not None and not self._watch.too_many:
            before.ops = ops
            exchange.send(CheckId(EVERY_OP, step), before)
