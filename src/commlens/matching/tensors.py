"""Tensors as the wire carries them, and as messages show them."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.model.collective import CollectiveArgs, TensorSpec

_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def wire_dtype(spec: TensorSpec) -> str:
    """Return the dtype on the wire: c10d sends complex numbers as pairs of real ones."""
    return _COMPLEX.get(spec.dtype, spec.dtype)


def wire_numel(spec: TensorSpec) -> int:
    """Return the number of elements on the wire."""
    return spec.numel * (2 if spec.dtype in _COMPLEX else 1)


def total(specs: Sequence[TensorSpec]) -> int:
    """Return the number of elements of several tensors on the wire."""
    return sum(wire_numel(spec) for spec in specs)


def is_sparse(spec: TensorSpec) -> bool:
    """Return whether a tensor is sparse: then only its dense shape is compared, and the number of non-zeros may differ."""
    return spec.layout.startswith("sparse")


def squeezed(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape without dimensions of size 1, which do not change the order of elements."""
    return tuple(size for size in spec.shape if size != 1)


def show_tensor(spec: TensorSpec) -> str:
    """Return ``"float32[5,5]"``; ``"25 elements"`` if only the number is known, as in torch's log lines."""
    if spec.dtype == "unknown":
        return f"{spec.numel} elements"
    shape = ",".join(map(str, spec.shape))
    odd = "" if spec.layout == "strided" else f" {spec.layout}"
    if spec.memory_order is not None:
        odd += f" in memory order {list(spec.memory_order)}"
    return f"{spec.dtype}[{shape}]{odd}"


def show_tensors(specs: Sequence[TensorSpec]) -> str:
    """Return ``"float32[5,5]"``, ``"4 x float32[5]"``, or ``"float32[5] and 3 more"``."""
    if not specs:
        return "no tensor"
    first = show_tensor(specs[0])
    if len(specs) == 1:
        return first
    if all(spec == specs[0] for spec in specs):
        return f"{len(specs)} x {first}"
    return f"{first} and {len(specs) - 1} more"


def payload(args: CollectiveArgs) -> tuple[TensorSpec, ...]:
    """Return the tensors that every rank has: its contribution, or its result if only the root contributes."""
    if args.op == "scatter":
        return args.outputs or args.inputs[:1]
    return args.inputs or args.outputs
