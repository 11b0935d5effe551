"""Hashes and statistics of tensors, made where the tensors are. On an accelerator, nothing here
waits for the device: the numbers are read later, by another thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from commlens.model.cause import TensorKind
from commlens.model.numbers import Measure
from commlens.numbers.weights import MASK, ROW, column_weights, row_weights, signed

WITH_STATISTICS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROWS_AT_ONCE: Final = 128  # on an accelerator: 64 MiB of scratch memory


class Named(NamedTuple):
    """A tensor to measure: the part of it that is on this rank."""

    kind: TensorKind
    name: str
    tensor: torch.Tensor


class Unread:
    """Measures that may still be computed by the device."""

    def __init__(self, named: Sequence[Named]) -> None:
        """Begin to measure. The tensors may change as soon as this returns."""
        self._about = [
            (each.kind, each.name, each.tensor.numel(), str(each.tensor.dtype)[6:])
            for each in named
        ]
        with torch.no_grad():
            tensors = [each.tensor.detach() for each in named]
            self._digests = _stacked([_digest(each) for each in tensors])
            self._statistics = _statistics(tensors)
        self._ready = _event(tensors)

    def read(self) -> list[Measure]:
        """Return the measures, in the order of the tensors. Waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
        digests = [value & MASK for value in self._digests.tolist()]
        measures = []
        for (kind, name, items, dtype), digest, (norm, total, nans, infs) in zip(
            self._about, digests, self._statistics.tolist(), strict=True
        ):
            mean = total / items if items else 0.0
            measures.append(
                Measure(kind, name, digest, items, dtype, norm, mean, int(nans), int(infs))
            )
        return measures


def reason_to_skip(tensor: Any) -> str | None:
    """Return why a tensor cannot be compared; None if it can."""
    if not isinstance(tensor, torch.Tensor):
        return "no tensor"
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_quantized:
        return "quantised"
    if tensor.device.type == "meta" or _is_fake(tensor):
        return "fake"
    if is_traceable_wrapper_subclass(tensor):
        return "made of other tensors"
    if not tensor.numel():
        return "empty"
    if tensor.untyped_storage().size() == 0:
        return "freed"
    return None


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _event(tensors: Sequence[torch.Tensor]) -> Any:
    """Return an event behind all that was begun here; None if it is done already."""
    device = next((each.device for each in tensors if each.device.type != "cpu"), None)
    if device is None:
        return None
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def _stacked(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return scalars as one tensor, on the way to the CPU."""
    if not scalars:
        return torch.empty(0, dtype=torch.int64)
    return _to_cpu(torch.stack(list(scalars)))


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


# --- the hash

_columns: dict[torch.device, torch.Tensor] = {}
_rows: dict[torch.device, torch.Tensor] = {}


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of a tensor's bytes, as a signed scalar; see ``weights.py``."""
    words = _words(tensor)
    device, count = words.device, words.numel()
    columns = _columns.get(device)
    if columns is None:
        numbers = torch.tensor([signed(value) for value in column_weights()])
        columns = _columns[device] = numbers.to(device)
    if count <= ROW:
        return _weighed(words, columns[:count])
    rows = -(-count // ROW)
    weights = _rows.get(device)
    if weights is None or len(weights) < rows:
        numbers = torch.tensor([signed(value) for value in row_weights(2 * rows)])
        weights = _rows[device] = numbers.to(device)
    return _weighed(_sums_of_rows(words, columns), weights[:rows])


def _sums_of_rows(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    whole = values.numel() // ROW
    sums = []
    if values.device.type == "cpu":
        scratch = torch.empty(ROW, dtype=torch.int64)
        for row in range(whole):  # a row stays in the processor's cache
            sums.append(torch.dot(scratch.copy_(values[row * ROW : (row + 1) * ROW]), columns))
    else:
        for first in range(0, whole, _ROWS_AT_ONCE):
            last = min(whole, first + _ROWS_AT_ONCE)
            block = values[first * ROW : last * ROW].view(-1, ROW)
            sums += (block * columns).sum(1).unbind()
    if rest := values.numel() - whole * ROW:
        sums.append(_weighed(values[whole * ROW :], columns[:rest]))
    return torch.stack(sums)


def _weighed(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of words times weights, modulo 2**64."""
    if words.device.type == "cpu":
        return torch.dot(words.to(torch.int64), weights)
    return (words * weights).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 32-bit words, the last one filled up with zeros."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    if size >= 4:
        return flat.view(torch.int32)
    if flat.storage_offset() * size % 4:
        flat = flat.clone()
    parts = flat.view(torch.uint8 if size == 1 else torch.int16)
    if missing := -parts.numel() * size % 4:
        parts = torch.nn.functional.pad(parts, (0, missing // size))
    return parts.view(torch.int32)


# --- statistics


def _statistics(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return each tensor's norm, sum, and numbers of NaN and infinite elements."""
    if not tensors:
        return torch.empty(0, 4)
    zero = torch.zeros((), device=tensors[0].device)
    floating = [each for each in tensors if each.dtype in WITH_STATISTICS]
    norms = iter(_norms(floating))
    rows = []
    for tensor in tensors:
        if tensor.dtype not in WITH_STATISTICS:
            rows.append(torch.stack([zero, zero, zero, zero]))
            continue
        norm = next(norms).to(torch.float32)
        total = tensor.sum(dtype=torch.float32)
        if tensor.device.type == "cpu" and math.isfinite(norm.item()):
            rows.append(torch.stack([norm, total, zero, zero]))
            continue
        nans, infs = torch.isnan(tensor).sum(), torch.isinf(tensor).sum()
        rows.append(torch.stack([norm, total, nans.float(), infs.float()]))
    return _to_cpu(torch.stack(rows))


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return norms in single precision: those of half a tensor may be too large for its type."""
    by_type: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_type.setdefault((tensor.dtype, tensor.device), []).append(index)
    norms: dict[int, torch.Tensor] = {}
    for indices in by_type.values():
        wide = torch.float64 if tensors[indices[0]].dtype == torch.float64 else torch.float32
        found = torch._foreach_norm([tensors[index] for index in indices], 2, wide)
        norms.update(zip(indices, found, strict=True))
    return [norms[index] for index in range(len(tensors))]
