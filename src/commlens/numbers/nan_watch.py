"""The first NaN of a rank (``check_numbers: nan``): the inputs of its collectives and the outputs
of its modules are looked at.

A NaN alone is no fault: a gradient scaler lets half-precision gradients overflow and leaves the
step out. It is reported when a parameter has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from commlens.model.numbers import NanEvent
from commlens.numbers.measuring import WITH_STATISTICS, reason_to_skip
from commlens.numbers.replicas import find_roots, local_part, plain_name
from commlens.tap import tap

# they send nothing from ranks other than the root, whose buffers may hold anything
_FROM_ROOT = frozenset({"broadcast_", "scatter_"})
_WITHOUT_INPUT = frozenset({"recv_", "recv_any_source_", "barrier"})


class NanWatch:
    """Subscriber of the tap, and of the modules' forward passes."""

    def __init__(self) -> None:
        self.step = 1  # of the first optimizer, which is under way
        self.event: NanEvent | None = None
        self._number = 0  # of the collectives in this step

    def start(self) -> None:
        """Look at all collectives and modules from now on."""
        tap.attach(self)
        register_module_forward_hook(self._after_forward)

    def next_step(self, step: int) -> None:
        """Begin a step."""
        self.step, self._number = step, 0

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> None:
        """Look at what a collective is about to send."""
        self._number += 1
        if self.event is not None or spec.name in _WITHOUT_INPUT:
            return
        if spec.name in _FROM_ROOT and not _is_root(spec, arguments):
            return
        inputs = [
            arguments[index]
            for index in spec.tensors
            if index not in spec.writes and index < len(arguments)
        ]
        with torch.no_grad():
            if any(map(_has_nan, torch.utils._pytree.tree_leaves(inputs))):
                self.event = NanEvent(self.step, self._number, op=spec.name.rstrip("_"))

    def returned(self, token: Any, result: Any) -> None:
        """Do nothing."""

    def raised(self, token: Any, error: BaseException) -> None:
        """Do nothing."""

    # --- called by torch

    def _after_forward(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """Look at the output of a module; the innermost module comes first."""
        if torch.compiler.is_compiling() or self.event is not None:
            return
        with torch.no_grad():
            if any(map(_has_nan, torch.utils._pytree.tree_leaves(output))):
                self.event = NanEvent(self.step, self._number, module=_name_of(module))


def has_nan_parameter(optimizer: Any) -> bool:
    """Return whether any parameter of an optimizer is NaN. Waits for the device."""
    with torch.no_grad():
        return any(
            _has_nan(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )


def _has_nan(tensor: Any) -> bool:
    tensor = local_part(tensor)
    if reason_to_skip(tensor) is not None or tensor.dtype not in WITH_STATISTICS:
        return False
    tensor = tensor.detach()
    # A sum is finite in almost all cases, and is computed much faster.
    return bool(torch.isnan(tensor.sum())) and bool(torch.isnan(tensor).any())


def _is_root(spec: tap.OpSpec, arguments: tuple[Any, ...]) -> bool:
    group = tap.unbox_group(arguments[spec.process_group])
    return bool(spec.root >= 0 and group.rank() == arguments[spec.root])


def _name_of(module: torch.nn.Module) -> str:
    """Return a module's name in its model; its class if it holds nothing to find the model by."""
    for root in find_roots(module.parameters()):
        for name, each in root.named_modules():
            if each is module:
                return plain_name(name) if name else type(module).__name__
    return type(module).__name__
