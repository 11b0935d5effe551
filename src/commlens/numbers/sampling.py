"""Checks that happen by themselves after an optimizer's steps (the setting ``check_numbers``).

torch calls the hook after each step of each optimizer. Without the setting, nothing is installed.
The models are found from the parameters, once. Code that torch compiles is left alone.

With ``every=100`` (and after the first few steps), the sampler measures the parameters, gradients
and states of an optimizer after its step, and sends the hashes to the exchange of all ranks. During
that step of the first optimizer, it measures the outputs of collectives and the first batch, too.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from commlens.model.number_checks import EARLY_STEPS, NumberChecks
from commlens.model.numbers import CheckId
from commlens.numbers import model_inputs
from commlens.numbers.checks import exchange_of
from commlens.numbers.comparison import BATCH, NAN, OPTIMIZER
from commlens.numbers.exchange import Exchange, log_stop
from commlens.numbers.fsdp_modules import FsdpModules
from commlens.numbers.inspection import Inspection, tensors_to_check
from commlens.numbers.measuring import Named, Unread, reason_to_skip, versions
from commlens.numbers.nan_watch import NanWatch, has_nan_parameter
from commlens.numbers.op_watch import OpChecks
from commlens.numbers.outputs import OutputWatch
from commlens.numbers.replicas import Model, Replicas, everyone, find_roots
from commlens.tap.cuda_graphs import is_capturing

log = logging.getLogger("commlens")

_SEARCHES_MAX: Final = 16
_LEFT_BY_A_STEP: Final = ("parameter", "optimizer-state")
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


class FollowedOptimizer:
    """The steps that one optimizer has made."""

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of their first steps, from 1
        self.steps = 0
        self.versions: list[int | None] = []  # of the parameters, after the last step


class TensorSampler:
    """Checks the optimizers and models of this process. The steps of the first optimizer to make
    one are the steps of the program.
    """

    def __init__(self, plan: NumberChecks) -> None:
        self.plan = plan
        self.off = False
        self.watch: NanWatch | None = None  # until the first NaN is reported
        self.ops: OpChecks | None = None
        self._followed: weakref.WeakKeyDictionary[Any, FollowedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._optimizers = 0  # that have made a step, those that are gone included
        self._steps = 0  # of the first optimizer
        self._step_of_inputs = 0  # whose inputs were compared last
        self._outputs = OutputWatch()
        self._models: list[Model] = []
        self._searches = 0  # for models
        self._warned_of_copies = False

    def note_inputs(
        self, module: Any, ranks_of: Callable[[], tuple[int, ...]], inputs: Any
    ) -> None:
        """Compare the first inputs of a step after which tensors are compared."""
        step = self._steps + 1
        is_noted = self._step_of_inputs == step
        if is_noted or not self._is_due(step) or not model_inputs.is_training(module):
            return
        self._step_of_inputs = step
        ranks = ranks_of()
        exchange = self._exchange()
        if exchange is None or len(ranks) < 2:
            return
        kept_by = (Replicas(ranks, "different"),)
        leaves = torch.utils._pytree.tree_leaves(inputs)
        batch = [each for each in leaves if reason_to_skip(each) is None]
        if any(tensor.numel() > 1 for tensor in batch):
            tensors = [
                Named("batch", f"input {number}", tensor, kept_by)
                for number, tensor in enumerate(batch)
            ]
            exchange.send(CheckId(BATCH, step), Inspection(tensors))

    def after_step(self, optimizer: Any) -> None:
        """Count a step, and compare the tensors that must be alike if a check is due."""
        followed = self._followed.get(optimizer)
        is_first = followed.number == 1 if followed is not None else not self._optimizers
        if self.ops is None or not is_first:
            self._count_and_compare(optimizer)
            return
        exchange = self._exchange()
        self.ops.end(self._steps + 1, exchange)
        self._count_and_compare(optimizer)
        if self._is_due(self._steps + 1) and exchange is not None:
            self.ops.begin(self._models, list(self._followed))

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
                tensors, names = self._tensors_and_names(followed, optimizer, parameters)
                last = [each for each in tensors if each.kind in _LEFT_BY_A_STEP]
                exchange.send(self._check(followed, names), Inspection(last, nans=False))

    def stop(self) -> None:
        """Check nothing any more."""
        self.off = True
        self._outputs.stop()
        if self.watch is not None:
            self.watch.stop()
        if self.ops is not None:
            self.ops.stop()

    def _is_due(self, step: int) -> bool:
        return step in EARLY_STEPS or step % self.plan.every == 0

    def _count_and_compare(self, optimizer: Any) -> None:
        followed = self._followed.get(optimizer)
        if followed is None:
            self._optimizers += 1
            followed = self._followed[optimizer] = FollowedOptimizer(self._optimizers)
        followed.steps += 1
        parameters = _parameters(optimizer)
        followed.versions = versions(parameters)
        outputs: list[Unread] = []
        if followed.number == 1:
            outputs = self._begin_step(followed.steps + 1)
            self._steps = followed.steps
            if self.watch is not None:
                self._report_nan(self.watch, optimizer)
        exchange = self._exchange() if self._is_due(followed.steps) else None
        if exchange is None:
            return
        tensors, names = self._tensors_and_names(followed, optimizer, parameters)
        if not names and not self._warned_of_copies:
            self._warned_of_copies = True
            if dist.get_rank() == 0:
                log.warning(
                    "commlens: %s %d trains tensors that belong to no module, as Megatron's"
                    " optimizers for mixed precision train copies of the parameters: the"
                    " parameters, gradients and states of this optimizer are not compared."
                    " commlens.check_numbers(model) compares those of the model.",
                    OPTIMIZER,
                    followed.number,
                )
        inspection = Inspection(tensors, nans=not self.plan.nan, outputs=outputs)
        exchange.send(self._check(followed, names), inspection)

    def _begin_step(self, step: int) -> list[Unread]:
        """Begin a step of the first optimizer. Return the outputs of the step that has ended."""
        outputs = self._outputs.take()
        if self._is_due(step) and not self.off:
            self._outputs.start()
        else:
            self._outputs.stop()
        if self._outputs.error is not None:
            raise self._outputs.error
        return outputs

    def _report_nan(self, watch: NanWatch, optimizer: Any) -> None:
        """Report where NaN came up in the step that has ended, if a parameter has it."""
        if watch.error is not None:
            raise watch.error
        if watch.event is not None and (exchange := self._exchange()) is not None:
            if has_nan_parameter(optimizer):
                exchange.send(CheckId(NAN, 1), Inspection(first_nan=watch.event))
                watch.stop()
                self.watch = None
                return
            watch.event = None  # a gradient scaler left the step out
        watch.next_step(self._steps + 1)

    def _tensors_and_names(
        self, followed: FollowedOptimizer, optimizer: Any, parameters: Sequence[Any]
    ) -> tuple[list[Named], list[str]]:
        """Return what to compare of an optimizer and its models, and the parameters' names."""
        tensors: list[Named] = []
        names: list[str] = []
        only = set(map(id, parameters))
        for model in self._models_of(followed, parameters):
            is_first = model.first_of is followed
            names += [model.places[each].name for each in only if each in model.places]
            tensors += tensors_to_check(model, optimizer, only=only, buffers=is_first)
            if is_first:
                tensors += model.fsdp.take()
        return tensors, names

    def _models_of(self, followed: FollowedOptimizer, parameters: Sequence[Any]) -> list[Model]:
        """Return the models that hold an optimizer's parameters; search for them if need be."""
        self._models = [model for model in self._models if model.is_alive]
        known = [model for model in self._models if any(id(p) in model.places for p in parameters)]
        if not known and self._searches < _SEARCHES_MAX:
            self._searches += 1
            model = Model(find_roots(parameters))
            model.first_of = followed
            self._models.append(model)
            model.fsdp = FsdpModules(model)
            known = [model]
        return known

    def _check(self, followed: FollowedOptimizer, names: Sequence[str]) -> CheckId:
        return CheckId(
            f"{OPTIMIZER} {followed.number}",
            followed.steps,
            self.plan.tolerance,
            tensors=hashlib.blake2b(repr(sorted(names)).encode(), digest_size=8).hexdigest(),
        )

    def _exchange(self) -> Exchange | None:
        """Return the exchange of all ranks; None if there is no rank to compare with. Switch the
        sampler off if the exchange has ended by an error, which it has logged.
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
