"""Tensors as the wire carries them, and as messages show them."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.model.collective import TensorSpec

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
    """Return whether a tensor is sparse: then only its dense shape is compared, and the number of
    non-zeros may differ.
    """
    return spec.layout.startswith("sparse")


def squeezed(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape without dimensions of size 1, which do not change the order of elements."""
    return tuple(size for size in spec.shape if size != 1)
