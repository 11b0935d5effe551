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

import logging
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from commlens.model.cause import TensorKind
from commlens.model.grouping import grouped
from commlens.model.numbers import CheckId, Key, OpLog, OpPlace, OpRun
from commlens.numbers.comparison import EVERY_OP
from commlens.numbers.exchange import Exchange
from commlens.numbers.inspection import CheckedTensor, Inspection, tensors_to_check
from commlens.numbers.measuring import hash_without_nan, reason_to_skip
from commlens.numbers.model_inputs import is_training
from commlens.numbers.replicas import Model, find_roots, plain_name
from commlens.tap.running_frames import user_line

log = logging.getLogger("commlens")

RUNS_MAX: Final = 100_000
"""Ops of one step; a longer step is not compared."""

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_UNFILLED: Final = ("empty", "new_empty", "_empty", "resize", "set_", "record_stream")
_NAMED: Final[tuple[TensorKind, ...]] = ("parameter", "buffer", "optimizer-state")
# their further outputs are scratch memory
_WITH_SCRATCH: Final = ("rnn", "flash", "efficient", "cudnn", "miopen", "fused_sdp")


class _Place(NamedTuple):
    """Where an op runs."""

    module: Any  # None: in none
    backward: bool
    line: str
    after: str  # the last collective before it


class _Run(NamedTuple):
    """An op, with the positions of its hashes."""

    op: str
    arguments: tuple[str, ...]
    inputs: list[int]
    outputs: list[int]
    reads: list[tuple[int, int]]  # number of the known tensor, position of its hash
    writes: list[tuple[int, int]]
    place: _Place


class _OpFacts:
    """The facts about an op that its schema shows."""

    def __init__(self, op: Any) -> None:
        name = op._schema.name.partition("::")[2]
        arguments = op._schema.arguments
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
        self.names = [each.name for each in arguments]
        self._writes = [
            index
            for index, each in enumerate(arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        if op.namespace == "c10d":  # its schemas do not tell
            outputs = [i for i, each in enumerate(self.names) if each.startswith("output")]
            self._writes = outputs or list(range(len(self.names)))

    def argument(self, index: int, args: Any, kwargs: Any) -> Any:
        """Return an argument by its place in the schema; None if it was not passed."""
        return args[index] if index < len(args) else kwargs.get(self.names[index])

    def written(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the arguments that the op writes to."""
        return _tensors([self.argument(index, args, kwargs) for index in self._writes])


class _KnownTensor(NamedTuple):
    """A parameter, buffer or state, and the addresses that it takes up."""

    key: Key
    tensor: torch.Tensor
    begin: int
    end: int


class _KnownTensors:
    """The named tensors of a step. Each has a number, in the order of their addresses."""

    def __init__(self, tensors: Iterable[CheckedTensor]) -> None:
        known = []
        for each in tensors:
            tensor = each.named.tensor
            if reason_to_skip(tensor) is None and tensor.is_contiguous():
                begin = tensor.data_ptr()
                end = begin + tensor.numel() * tensor.element_size()
                known.append(_KnownTensor((each.named.kind, each.named.name), tensor, begin, end))
        self.by_number = sorted(known, key=lambda each: each.begin)
        self._begins = [each.begin for each in self.by_number]
        self._left_out: set[int] = set()

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Find no known tensor any more that shares memory with one of these."""
        self._left_out.update(self.find(tensors))

    def find(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Return the numbers of the known tensors that share memory with one of these."""
        return sorted({number for each in tensors for number in self._find(each)} - self._left_out)

    def _find(self, tensor: torch.Tensor) -> Iterable[int]:
        begin = tensor.data_ptr()
        first = max(0, bisect_right(self._begins, begin) - 1)
        for number in range(first, bisect_left(self._begins, begin + _extent(tensor))):
            if self.by_number[number].end > begin:
                yield number


class _RecordedStep:
    """The ops of a step, as far as it has run."""

    def __init__(self, tensors: Iterable[CheckedTensor]) -> None:
        self._runs: list[_Run] = []
        self._hashes: list[torch.Tensor] = []
        self._forward_places: dict[int, tuple[Any, str]] = {}  # by the number of a backward node
        self._after = ""
        self._known = _KnownTensors(tensors)
        self._initial = [self._hash(each.tensor) for each in self._known.by_number]

    def __len__(self) -> int:
        """Return the number of ops so far."""
        return len(self._runs)

    def before(
        self, func: Any, facts: _OpFacts, args: Any, kwargs: Any, module: Any
    ) -> _Run | None:
        """Return an op with the hashes of its inputs; None if there is nothing to compare."""
        if facts.is_view:
            return None
        place = self._place(module)
        if facts.is_collective:
            self._after = f"{facts.name} at {place.line}" if place.line else facts.name
            # it writes them at a time of its own
            self._known.leave_out(facts.written(args, kwargs))
            return None
        tensors = _tensors((args, kwargs))
        inputs = [self._hash(each) for each in tensors] if facts.is_function else []
        if facts.is_random:
            inputs.append(self._hash_of_generator(facts, args, kwargs, tensors))
        reads = self._hash_known(tensors)
        return _Run(str(func), _described((args, kwargs)), inputs, [], reads, [], place)

    def add(self, run: _Run, facts: _OpFacts, args: Any, kwargs: Any, result: Any) -> None:
        """Add an op that has run, with the hashes of its outputs."""
        written = facts.written(args, kwargs)
        if facts.is_function:
            outputs = written or _tensors(result)
            run.outputs.extend(self._hash(each) for each in outputs[: facts.outputs])
        run.writes.extend(self._hash_known(written))
        if run.outputs or run.writes or run.reads:
            self._runs.append(run)

    def log(self, names: Mapping[int, str]) -> tuple[list[OpPlace], list[OpRun]]:
        """Return the places where the ops ran, and the ops. Waits for the devices.

        Args:
            names: of the modules, by id.
        """
        hashes = _read(self._hashes)
        places: dict[OpPlace, int] = {}
        runs: list[OpRun] = []
        # hash of each known tensor, as an op left it
        last = dict(enumerate(hashes[position] for position in self._initial))
        for run in self._runs:
            module, backward, line, after = run.place
            name = names.get(id(module), type(module).__name__) if module is not None else ""
            place = places.setdefault(OpPlace(name, backward, line, after), len(places))
            for number, position in run.reads:
                value = hashes[position]
                if last[number] != value:
                    last[number] = value
                    change = (*self._known.by_number[number].key, value)
                    runs.append(OpRun("", (), (), (), (change,), place))
            writes = {number: hashes[position] for number, position in run.writes}
            last |= writes
            runs.append(
                OpRun(
                    run.op,
                    run.arguments,
                    tuple(hashes[each] for each in run.inputs),
                    tuple(hashes[each] for each in run.outputs),
                    tuple(
                        (*self._known.by_number[number].key, value)
                        for number, value in writes.items()
                    ),
                    place,
                )
            )
        return list(places), runs

    def _place(self, module: Any) -> _Place:
        """Return where an op runs. In a backward pass, that is where its forward ran."""
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            module, line = self._forward_places.get(node._sequence_nr(), (None, ""))
            return _Place(module, True, line or user_line(sys._getframe(2)), self._after)
        line = user_line(sys._getframe(2))
        if module is not None and torch.is_grad_enabled():
            number = torch._C._autograd._get_sequence_nr() - 1
            # later ops without a node of their own see the same number
            self._forward_places.setdefault(number, (module, line))
        return _Place(module, False, line, self._after)

    def _hash(self, tensor: torch.Tensor) -> int:
        """Return the position of a tensor's hash, which the device may still compute."""
        self._hashes.append(hash_without_nan(tensor))
        return len(self._hashes) - 1

    def _hash_known(self, tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
        """Return number and hash of the known tensors that share memory with one of these."""
        return [
            (number, self._hash(self._known.by_number[number].tensor))
            for number in self._known.find(tensors)
        ]

    def _hash_of_generator(
        self, facts: _OpFacts, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
    ) -> int:
        given = kwargs.get("generator")
        if given is None and "generator" in facts.names:
            given = facts.argument(facts.names.index("generator"), args, kwargs)
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        if given is None:
            given = torch.default_generator
            if device.type == "cuda" and torch.cuda.is_initialized():
                index = torch.cuda.current_device() if device.index is None else device.index
                given = torch.cuda.default_generators[index]
        return self._hash(given.get_state())


class OpWatch:
    """Sees the ops of this thread, and records those of one step after another. An error ends it,
    and is kept.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.too_many = False  # ops in this step
        self.on_forward: Callable[[Any], None] | None = None
        """Is called before a module runs that is trained."""
        self._is_on = False
        self._step = _RecordedStep([])
        self._mode = _Mode(self)
        self._pid = os.getpid()
        self._ops: dict[Any, _OpFacts] = {}
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
        self._mode.__enter__()

    def start(self, tensors: Iterable[CheckedTensor]) -> None:
        """Begin a step, in which these tensors are known by name."""
        self._is_on = self.too_many = False
        self._step = _RecordedStep(tensors)
        self._is_on = self.error is None

    def take(self, names: Mapping[int, str]) -> tuple[list[OpPlace], list[OpRun]]:
        """End the step. Return the places where its ops ran, and the ops. Waits for the devices.

        Args:
            names: of the modules, by id.
        """
        self._is_on = False
        step, self._step = self._step, _RecordedStep([])
        return step.log(names)

    def stop(self) -> None:
        """Record nothing any more, and let go of all tensors."""
        self.on_forward = None
        self._is_on = False
        self._step = _RecordedStep([])

    def _enter(self, module: Any, _inputs: Any) -> None:
        self._modules.append(module)
        if self.on_forward is not None and torch.is_grad_enabled():
            self.on_forward(module)

    def _leave(self, module: Any, _inputs: Any, _output: Any) -> None:
        while self._modules and self._modules.pop() is not module:
            pass

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, and record it."""
        if not self._is_on or os.getpid() != self._pid:
            return func(*args, **kwargs)
        facts = self._ops.get(func)
        run = None
        try:
            if facts is None:
                facts = self._ops[func] = _OpFacts(func)
            module = self._modules[-1] if self._modules else None
            run = self._step.before(func, facts, args, kwargs, module)
        except Exception as error:
            self._fail(error)
        result = func(*args, **kwargs)
        if facts is not None and run is not None and self._is_on:
            try:
                self._step.add(run, facts, args, kwargs, result)
            except Exception as error:
                self._fail(error)
            if len(self._step) > RUNS_MAX:
                self.too_many, self._is_on = True, False
        return result

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._is_on = False


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """Hands the ops of this thread to an :class:`OpWatch`."""

    def __init__(self, watch: OpWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # the tensors that it is made of come next
        return self._watch.run(func, args, kwargs or {})


def module_names(roots: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Return the names of modules in their models, by id."""
    return {
        id(module): plain_name(name) if name else type(module).__name__
        for root in roots
        for name, module in root.named_modules()
    }


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


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    last: int = sum((size - 1) * stride for size, stride in sizes_and_strides)
    return (last + 1) * int(tensor.element_size())


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
        tensors: list[CheckedTensor] = []
        for model in models:
            for number, optimizer in enumerate(states):
                some = tensors_to_check(model, optimizer, buffers=not number)
                kinds = _NAMED if not number else ("optimizer-state",)
                tensors += [each for each in some if each.named.kind in kinds]
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
        places, runs = self._watch.take(module_names(roots))
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
            before.ops = OpLog(tuple(places), tuple(runs))
            exchange.send(CheckId(EVERY_OP, step), before)
