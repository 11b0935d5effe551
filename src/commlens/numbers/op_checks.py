"""Checks of every op (``check_numbers: every-op``): which steps are recorded, and which tensors are
known by name in them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from commlens.model.cause import TensorKind
from commlens.model.numbers import CheckId, OpLog
from commlens.numbers.comparison import EVERY_OP
from commlens.numbers.exchange import Exchange
from commlens.numbers.inspection import Inspection, Looked, look_at
from commlens.numbers.model_inputs import is_training
from commlens.numbers.op_watch import RUNS_MAX, OpWatch, module_names
from commlens.numbers.replicas import Model, find_roots

log = logging.getLogger("commlens")

_NAMED: Final[tuple[TensorKind, ...]] = ("parameter", "buffer", "optimizer-state")


class OpChecks:
    """The ops of the steps of the first optimizer."""

    def __init__(self) -> None:
        self._watch = OpWatch()
        self._models: Sequence[Model] = ()
        self._before: Inspection | None = None  # the named tensors when the step began
        self._told = False

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
        looked: list[Looked] = []
        for model in models:
            for number, optimizer in enumerate(states):
                some = look_at(model, optimizer, buffers=not number)
                kinds = _NAMED if not number else ("optimizer-state",)
                looked += [each for each in some if each.named.kind in kinds]
        self._before = Inspection(looked, nans=False)
        self._watch.start(looked)

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
        if self._watch.too_many and not self._told:
            self._told = True
            log.warning(
                "commlens: step %s has more than %s ops; those steps are not compared op by op",
                step,
                RUNS_MAX,
            )
        if before is not None and exchange is not None and not self._watch.too_many:
            before.ops = OpLog(tuple(places), tuple(runs))
            exchange.send(CheckId(EVERY_OP, step), before)
