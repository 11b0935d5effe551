"""Find the first NaN of a rank in the inputs of its collectives and the outputs of its modules (the
setting ``check_numbers: nan``).

A NaN alone is no fault: a gradient scaler lets half-precision gradients overflow and leaves the
step out. So the sampler (``sampling.py``) reports it only when a parameter has it, and otherwise
forgets it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from commlens.model.numbers import NanEvent
from commlens.numbers.batches import WITH_STATISTICS
from commlens.numbers.measuring import reason_to_skip
from commlens.numbers.replicas import find_roots, local_part, module_names
from commlens.tap import tap
from commlens.tap.cuda_graphs import is_capturing

# only the root sends: the buffers of other ranks may hold anything
_SENT_BY_ROOT: Final = frozenset({"broadcast_", "scatter_"})
_WITHOUT_INPUT: Final = frozenset({"recv_", "recv_any_source_", "barrier"})


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
            is_sender = spec.name not in _SENT_BY_ROOT or (
                spec.root >= 0
                and tap.unbox_group(arguments[spec.process_group]).rank() == arguments[spec.root]
            )
            if is_sender and _any_has_nan(sent):
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
    names = module_names(find_roots(module.parameters()))
    return names.get(id(module), type(module).__name__)
