"""The parameters of the traced modules and their sharding between steps.

FSDP2 gathers a block's parameters while it runs, so they are read when a step has ended. For a
model that only runs forward, or is freed before the trace stops, they are read when its root's
first call returns.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Module

from commlens.model.trace import TracedParameter
from commlens.tracing.attribution.module_calls import ModuleCall, ModuleRow


class Parameters:
    """The parameters of a tracker's rows."""

    def __init__(self, rows: list[ModuleRow]) -> None:
        self._rows = rows
        self._known: dict[ModuleRow, tuple[TracedParameter, ...]] = {}
        self._read_rows = 0  # number of rows read so far

    def read(self, first: int = 0) -> None:
        """Record the current sharding for the rows from ``first`` on whose modules still exist."""
        meshes: dict[int, str] = {}
        for row in self._rows[first:]:
            module = row.ref()
            if module is not None:
                self._known[row] = tuple(_described(module, meshes))
        self._read_rows = len(self._rows)

    def left(self, call: ModuleCall) -> None:
        """Read the parameters of new rows when a root's call has returned."""
        if call.parent is None and self._read_rows < len(self._rows):
            self.read(self._read_rows)

    def of(self, row: ModuleRow) -> tuple[TracedParameter, ...]:
        """Return the parameters of a row."""
        return self._known.get(row, ())

    def of_path(self, path: str) -> tuple[TracedParameter, ...]:
        """Return the parameters of the first row with this path."""
        return next((self.of(row) for row in self._rows if row.path == path), ())


def _described(module: Module, meshes: dict[int, str]) -> list[TracedParameter]:
    found = []
    for name, tensor in module._parameters.items():
        if tensor is None:
            continue
        with contextlib.suppress(Exception):  # parameters of a lazy module have no shape yet
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
    return TracedParameter(
        name,
        str(tensor.placements),
        shape,
        dtype,
        local.numel() * local.element_size(),
        meshes[id(mesh)],
    )
