"""What parameters the traced modules have, and how they are sharded between two steps.

FSDP2 gathers a block's parameters while it runs, so they are looked at when a step is over. A model that is only called forward, or is
gone when the trace stops, was looked at when the call of its root had returned.

Tried on torch 2.6.0 and 2.13.0.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Module

from commlens.model.trace import TracedParameter
from commlens.tracing.modules import ModuleCall, ModuleRow


class Parameters:
    """The parameters of each row of a tracker."""

    def __init__(self, rows: list[ModuleRow]) -> None:
        """Begin without any.

        Args:
            rows: the tracker's, which grow.
        """
        self._rows = rows
        self._known: dict[ModuleRow, tuple[TracedParameter, ...]] = {}
        self._looked_at = 0  # so many rows

    def look(self, first: int = 0) -> None:
        """Note how the parameters lie now, of the rows from ``first`` on whose modules still exist."""
        meshes: dict[int, str] = {}
        for row in self._rows[first:]:
            module = row.ref()
            if module is not None:
                self._known[row] = tuple(_described(module, meshes))
        self._looked_at = len(self._rows)

    def left(self, call: ModuleCall) -> None:
        """A module's call has returned: that of a root has shown new modules, if any."""
        if call.parent is None and self._looked_at < len(self._rows):
            self.look(self._looked_at)

    def of(self, row: ModuleRow) -> tuple[TracedParameter, ...]:
        """The parameters of a row."""
        return self._known.get(row, ())


def _described(module: Module, meshes: dict[int, str]) -> list[TracedParameter]:
    found = []
    for name, tensor in module._parameters.items():
        if tensor is None:
            continue
        with contextlib.suppress(Exception):  # a lazy module's have no shape yet
            found.append(_parameter(name, tensor, meshes))
    return found


def _parameter(name: str, tensor: Any, meshes: dict[int, str]) -> TracedParameter:
    shape = tuple(int(length) for length in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        return TracedParameter(name, "", shape, dtype, tensor.numel() * tensor.element_size())
    mesh = tensor.device_mesh
    if id(mesh) not in meshes:
        meshes[id(mesh)] = str(mesh)
    local = tensor._local_tensor
    return TracedParameter(name, str(tensor.placements), shape, dtype, local.numel() * local.element_size(), meshes[id(mesh)])
