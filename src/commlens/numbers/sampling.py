"""Checks that happen by themselves after an optimizer's steps (the setting ``check_numbers``).

torch calls the hook after each step of each optimizer. Without the setting, nothing is installed.
The models are found from the parameters, once. Code that torch compiles is not looked at.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from commlens.model.number_checks import EARLY_STEPS, NumberChecks
from commlens.model.numbers import CheckId, NanEvent
from commlens.numbers import model_inputs
from commlens.numbers.batches import WITH_STATISTICS
from commlens.numbers.checks import exchange_of
from commlens.numbers.comparison import BATCH, NAN, OPTIMIZER
from commlens.numbers.exchange import Exchange, log_stop
from commlens.numbers.inspection import Inspection, Looked, look_at
from commlens.numbers.measuring import Named, reason_to_skip, versions
from commlens.numbers.op_watch import OpChecks
from commlens.numbers.outputs import Output, OutputWatch
from commlens.numbers.replicas import (
    Model,
    Replicas,
    everyone,
    find_roots,
    is_fsdp2,
    local_part,
    mesh_ranks,
    plain_name,
)
from commlens.tap import tap
from commlens.tap.cuda_graphs import is_capturing

log = logging.getLogger("commlens")

_SEARCHES_MAX: Final = 16
_LEFT_BY_A_STEP: Final = ("parameter", "optimizer-state")
_ROOT: Final = "the model"
_sampler: TensorSampler | None = None


def start(plan: NumberChecks) -> None:
    """Check from the next optimizer step on. A second call changes the plan."""
    global _sampler
    if _sampler is None:
        _sampler = TensorSampler(plan)
        register_optimizer_step_post_hook(_after_step)
        model_inputs.watch(_note_inputs)
    _sampler.plan = plan
    if plan.nan and _sampler.watch is None:
        _sampler.watch = NanWatch()
        _sampler.watch.start()
    if plan.every_op and _sampler.ops is None:
        _sampler.ops = OpChecks()
        _sampler.ops.install(_safely)


class TensorSampler:
    """The optimizers and models of this process."""

    def __init__(self, plan: NumberChecks) -> None:
        self.plan = plan
        self._followed: weakref.WeakKeyDictionary[Any, Followed] = weakref.WeakKeyDictionary()
        self._optimizers = 0
        self._models: list[Model] = []
        self._fsdp: weakref.WeakKeyDictionary[Model, FsdpModules] = weakref.WeakKeyDictionary()
        self._searches = 0
        self._noted = 0  # step whose inputs were compared
        self._steps = 0  # of the first optimizer
        self.watch: NanWatch | None = None  # until the first NaN is reported
        self.ops: OpChecks | None = None
        self._outputs = OutputWatch()
        self._told_of_copies = False
        self.off = False

    def after_step(self, optimizer: Any) -> None:
        """Count a step, and compare what must be alike if a check is due."""
        if self.ops is not None and self._is_first(optimizer):
            exchange = self._exchange()
            self.ops.end(self._steps + 1, exchange)
            self._compare(optimizer)
            if self._is_due(self._steps + 1) and exchange is not None:
                self.ops.begin(self._models, list(self._followed))
        else:
            self._compare(optimizer)

    def end(self) -> None:
        """Compare parameters and optimizer states after the last step. Leaves out an optimizer
        whose parameters code has written to since, such as by loading a checkpoint on one rank.
        Waits for no rank; after an exception, compares nothing.
        """
        exchange = self._exchange() if sys.exc_info()[0] is None else None
        if exchange is None:
            return
        exchange.is_ending = True
        if not self._optimizers and dist.get_rank() == 0:
            log.warning("commlens: no numbers were compared: no optimizer of torch made a step")
        for optimizer, followed in list(self._followed.items()):
            parameters = _parameters(optimizer)
            if not self._is_due(followed.steps) and followed.versions == versions(parameters):
                looked, names = self._look_at(followed, optimizer, parameters)
                last = [each for each in looked if each.named.kind in _LEFT_BY_A_STEP]
                exchange.send(self._check(followed, names), Inspection(last, nans=False))

    def _is_first(self, optimizer: Any) -> bool:
        """Return whether this optimizer made the first step of all."""
        followed = self._followed.get(optimizer)
        return followed.number == 1 if followed is not None else not self._optimizers

    def stop(self) -> None:
        """Check nothing any more."""
        self.off = True
        self._outputs.stop()
        if self.watch is not None:
            self.watch.stop()
        if self.ops is not None:
            self.ops.stop()

    def _compare(self, optimizer: Any) -> None:
        followed = self._followed.get(optimizer)
        if followed is None:
            self._optimizers += 1
            followed = self._followed[optimizer] = Followed(self._optimizers)
        followed.steps += 1
        parameters = _parameters(optimizer)
        followed.versions = versions(parameters)
        outputs: list[Output] = []
        if followed.number == 1:
            outputs = self._next_step(followed.steps + 1)
            self._steps = followed.steps
            if self.watch is not None:
                self._look_for_nan(self.watch, optimizer)
        exchange = self._exchange() if self._is_due(followed.steps) else None
        if exchange is None:
            return
        looked, names = self._look_at(followed, optimizer, parameters)
        if not names:
            self._tell_of_copies(followed)
        inspection = Inspection(looked, nans=not self.plan.nan, outputs=outputs)
        exchange.send(self._check(followed, names), inspection)

    def _look_at(
        self, followed: Followed, optimizer: Any, parameters: Sequence[Any]
    ) -> tuple[list[Looked], list[str]]:
        """Return what to compare of an optimizer and its models, and the parameters' names."""
        looked: list[Looked] = []
        names: list[str] = []
        only = set(map(id, parameters))
        for model in self._models_of(followed, parameters):
            names += [model.places[each].name for each in only if each in model.places]
            looked += look_at(model, optimizer, only=only, buffers=model.first_of is followed)
            if model.first_of is followed:
                looked += [Looked(*each) for each in self._fsdp[model].take()]
        return looked, names

    def _check(self, followed: Followed, names: Sequence[str]) -> CheckId:
        return CheckId(
            f"{OPTIMIZER} {followed.number}",
            followed.steps,
            self.plan.tolerance,
            tensors=hashlib.blake2b(repr(sorted(names)).encode(), digest_size=8).hexdigest(),
        )

    def _tell_of_copies(self, followed: Followed) -> None:
        """Log once, on rank 0, that an optimizer trains other tensors than those of the model."""
        if not self._told_of_copies and dist.get_rank() == 0:
            log.warning(
                "commlens: %s %d trains tensors that belong to no module, as Megatron's optimizers"
                " for mixed precision train copies of the parameters: the parameters, gradients and"
                " states of this optimizer are not compared. commlens.check_numbers(model) compares"
                " those of the model.",
                OPTIMIZER,
                followed.number,
            )
        self._told_of_copies = True

    def _next_step(self, step: int) -> list[Output]:
        """Begin a step of the first optimizer. Return the outputs of the step that has ended."""
        outputs = self._outputs.take()
        if self._is_due(step) and not self.off:
            self._outputs.start()
        else:
            self._outputs.stop()
        if self._outputs.error is not None:
            raise self._outputs.error
        return outputs

    def _look_for_nan(self, watch: NanWatch, optimizer: Any) -> None:
        """Report where NaN came up, when a parameter has it."""
        if watch.error is not None:
            raise watch.error
        if watch.event is not None and (exchange := self._exchange()) is not None:
            if has_nan_parameter(optimizer):
                exchange.send(CheckId(NAN, 1), Inspection(first_nan=watch.event))
                watch.stop()
                self.watch = None
                return
            watch.event = None  # the step was left out
        watch.next_step(self._steps + 1)

    def note_inputs(
        self, module: Any, ranks_of: Callable[[], tuple[int, ...]], inputs: Any
    ) -> None:
        """Compare the first inputs of a step, after which tensors are compared."""
        step = self._steps + 1
        if not self._is_due(step) or self._noted == step or not model_inputs.is_training(module):
            return
        self._noted = step
        ranks = ranks_of()
        exchange = self._exchange()
        if exchange is None or len(ranks) < 2:
            return
        kept_by = (Replicas(ranks, "different"),)
        tensors = [
            each for each in torch.utils._pytree.tree_leaves(inputs) if reason_to_skip(each) is None
        ]
        looked = [
            Looked(Named("batch", f"input {number}", tensor), kept_by)
            for number, tensor in enumerate(tensors)
        ]
        if any(tensor.numel() > 1 for tensor in tensors):
            exchange.send(CheckId(BATCH, step), Inspection(looked))

    def _exchange(self) -> Exchange | None:
        """Return the exchange of all ranks; None if there is no rank to compare with. Where it has
        ended by an error, which it has logged, nothing is measured any more.
        """
        exchange = (
            exchange_of(everyone())
            if dist.is_initialized() and dist.get_world_size() > 1 and not is_capturing()
            else None
        )
        if exchange is None or exchange.is_running:
            return exchange
        self.stop()
        return None

    def _is_due(self, step: int) -> bool:
        return step in EARLY_STEPS or step % self.plan.every == 0

    def _models_of(self, followed: Followed, parameters: Sequence[Any]) -> list[Model]:
        """Return the models that hold an optimizer's parameters; search for them if need be."""
        self._models = [model for model in self._models if model.is_alive]
        known = [model for model in self._models if any(id(p) in model.places for p in parameters)]
        if not known and self._searches < _SEARCHES_MAX:
            self._searches += 1
            model = Model(find_roots(parameters))
            model.first_of = followed
            self._models.append(model)
            self._fsdp[model] = FsdpModules(model)
            known = [model]
        return known


class Followed:
    """An optimizer."""

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of their first steps, from 1
        self.steps = 0
        self.versions: list[int | None] = []  # of the parameters, after the last step


def end() -> None:
    """Compare what the last steps changed, while there still is a default group."""
    if _sampler is not None and not _sampler.off:
        _safely(_sampler.end)


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _safely(method: Callable[..., None], *args: Any) -> None:
    """Call a method of the sampler; an error of it is logged and ends all checks."""
    try:
        method(*args)
    except Exception as error:
        if _sampler is not None:
            _sampler.stop()
        log_stop(error)


def _after_step(optimizer: Any, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
    if torch.compiler.is_compiling() or _sampler is None or _sampler.off:
        return
    _safely(_sampler.after_step, optimizer)


def _note_inputs(module: Any, ranks: Callable[[], tuple[int, ...]], inputs: Any) -> None:
    if _sampler is not None and not _sampler.off:
        _safely(_sampler.note_inputs, module, ranks, inputs)


class FsdpModules:
    """The modules of one model, and in which order they ran first since the last check.

    FSDP2 gathers a module's parameters when it runs, and the gathers of the ranks meet in their
    order. A rank that runs modules of equal shapes in another order computes with other parameters,
    and nothing fails.

    Args:
        model: the model; hooks are installed on its modules.
    """

    def __init__(self, model: Model) -> None:
        self._called: dict[str, None] = {}
        self._ranks: tuple[int, ...] = ()
        for root in model.alive():
            sharded = {name: module for name, module in root.named_modules() if is_fsdp2(module)}
            if sharded:
                # of the widest mesh
                meshes = (
                    each.device_mesh for each in root.parameters() if hasattr(each, "device_mesh")
                )
                self._ranks = max(map(mesh_ranks, meshes), key=len, default=())
            for name, module in sharded.items():
                self._follow(name, module)

    def take(self) -> Iterator[tuple[Named, tuple[Replicas, ...]]]:
        """Yield the modules in their order, which must be the same on all ranks, and forget it."""
        called, self._called = list(self._called), {}
        if len(self._ranks) > 1:
            kept_by = (Replicas(self._ranks, "equal"),)
            for name in called:
                yield Named("module", name, torch.zeros(1)), kept_by

    def _follow(self, name: str, module: nn.Module) -> None:
        ref = weakref.ref(self)
        title = plain_name(name) if name else _ROOT

        def note(_module: nn.Module, _args: Any) -> None:
            if not torch.compiler.is_compiling() and (modules := ref()) is not None:
                modules._called.setdefault(title)

        module.register_forward_pre_hook(note)


# they send nothing from ranks other than the root, whose buffers may hold anything


# --- the first NaN of a rank (check_numbers: nan)
#
# The inputs of its collectives and the outputs of its modules are looked at. A NaN alone is no
# fault: a gradient scaler lets half-precision gradients overflow and leaves the step out. It is
# reported when a parameter has it.

_FROM_ROOT = frozenset({"broadcast_", "scatter_"})
_WITHOUT_INPUT = frozenset({"recv_", "recv_any_source_", "barrier"})


class NanWatch(tap.Subscriber):
    """Subscriber of the tap, and of the modules' forward passes. An error ends it, and is kept."""

    def __init__(self) -> None:
        self.step = 1  # of the first optimizer, which is under way
        self.event: NanEvent | None = None
        self.error: Exception | None = None
        self._number = 0  # of the collectives in this step
        self._hook: RemovableHandle | None = None

    def start(self) -> None:
        """Look at all collectives and modules from now on."""
        tap.attach(self)
        self._hook = register_module_forward_hook(self._after_forward)

    def stop(self) -> None:
        """Look at nothing any more."""
        tap.detach(self)
        if self._hook is not None:
            self._hook.remove()

    def next_step(self, step: int) -> None:
        """Begin a step."""
        self.step, self._number = step, 0

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> None:
        """Look at what a collective is about to send."""
        self._number += 1
        if self.event is not None or spec.name in _WITHOUT_INPUT or is_capturing():
            return
        try:
            sent = [
                arguments[index]
                for index in spec.tensors
                if index not in spec.writes and index < len(arguments)
            ]
            if _is_sender(spec, arguments) and _any_has_nan(sent):
                self.event = NanEvent(self.step, self._number, op=spec.name.rstrip("_"))
        except Exception as error:
            self._fail(error)

    # --- called by torch

    def _after_forward(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Look at the output of a module; the innermost module comes first."""
        if torch.compiler.is_compiling() or self.event is not None or is_capturing():
            return
        try:
            if _any_has_nan(output):
                self.event = NanEvent(self.step, self._number, module=_name_of(module))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.stop()


def has_nan_parameter(optimizer: Any) -> bool:
    """Return whether any parameter of an optimizer is NaN. Waits for the device."""
    return _any_has_nan([group["params"] for group in optimizer.param_groups])


def _is_sender(spec: tap.OpSpec, arguments: tuple[Any, ...]) -> bool:
    if spec.name not in _FROM_ROOT:
        return True
    group = tap.unbox_group(arguments[spec.process_group])
    return bool(spec.root >= 0 and group.rank() == arguments[spec.root])


def _any_has_nan(values: Any) -> bool:
    with torch.no_grad():
        return any(map(_has_nan, torch.utils._pytree.tree_leaves(values)))


def _has_nan(tensor: Any) -> bool:
    tensor = local_part(tensor)
    if reason_to_skip(tensor) is not None or tensor.dtype not in WITH_STATISTICS:
        return False
    tensor = tensor.detach()
    # A sum is finite in almost all cases, and is computed much faster.
    return bool(torch.isnan(tensor.sum())) and bool(torch.isnan(tensor).any())


def _name_of(module: torch.nn.Module) -> str:
    """Return a module's name in its model; its class if it holds nothing to find the model by."""
    for root in find_roots(module.parameters()):
        for name, each in root.named_modules():
            if each is module:
                return plain_name(name) if name else type(module).__name__
    return type(module).__name__
