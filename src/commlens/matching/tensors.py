"""Tensors as the wire sees them, and as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.model.collective import CollectiveArgs, TensorSpec

_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def wire_dtype(spec: TensorSpec) -> str:
    """The dtype on the wire: c10d sends complex numbers as pairs of real ones."""
    return _COMPLEX.get(spec.dtype, spec.dtype)


def wire_numel(spec: TensorSpec) -> int:
    """Elements on the wire."""
    return spec.numel * (2 if spec.dtype in _COMPLEX else 1)


def total(specs: Sequence[TensorSpec]) -> int:
    """Elements on the wire of several tensors."""
    return sum(wire_numel(spec) for spec in specs)


def is_sparse(spec: TensorSpec) -> bool:
    """Sparse tensors are compared by their dense shape; how many non-zeros they hold may differ."""
    return spec.layout.startswith("sparse")


def squeezed(spec: TensorSpec) -> tuple[int, ...]:
    """The shape without dimensions of size 1, which change no meaning."""
    return tuple(size for size in spec.shape if size != 1)


def show_tensor(spec: TensorSpec) -> str:
    """``"float32[5,5]"``; ``"25 elements"`` where no more was told, as in torch's log lines."""
    if spec.dtype == "unknown":
        return f"{spec.numel} elements"
    shape = ",".join(map(str, spec.shape))
    odd = "" if spec.layout == "strided" else f" {spec.layout}"
    if spec.memory_order is not None:
        odd += f" in memory order {list(spec.memory_order)}"
    return f"{spec.dtype}[{shape}]{odd}"


def show_tensors(specs: Sequence[TensorSpec]) -> str:
    """``"float32[5,5]"``, or ``"4 x float32[5]"``, or the first and how many more."""
    if not specs:
        return "no tensor"
    first = show_tensor(specs[0])
    if len(specs) == 1:
        return first
    if all(spec == specs[0] for spec in specs):
        return f"{len(specs)} x {first}"
    return f"{first} and {len(specs) - 1} more"


def payload(asked: CollectiveArgs) -> tuple[TensorSpec, ...]:
    """The tensors that every rank of the collective has: its own contribution, or what it gets where only the root contributes."""
    if asked.op == "scatter":
        return asked.outputs or asked.inputs[:1]
    return asked.inputs or asked.outputs
