"""Hashes and statistics of tensors, made where the tensors are. On an accelerator, nothing here
waits for the device: the numbers are read later, by another thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from commlens.model.cause import TensorKind
from commlens.model.grouping import grouped
from commlens.model.numbers import Measure
from commlens.numbers.batches import (
    TINY,
    WITH_STATISTICS,
    elements_of,
    measure_together,
)
from commlens.numbers.replicas import Replicas
from commlens.numbers.weights import MASK, ROW, column_weights, row_weights, signed

_ROWS_AT_ONCE: Final = 128  # on an accelerator: 64 MiB of scratch memory


class Named(NamedTuple):
    """A tensor to measure: the part of it that is on this rank."""

    kind: TensorKind
    name: str
    tensor: torch.Tensor
    kept_by: tuple[Replicas, ...] = ()  # the sets of ranks that hold it, too
    parameter: str = ""  # of an optimizer's state: the name of the parameter that it belongs to
    source: str = ""  # of a collective's output: file name and line number of the call


class Unread:
    """Measures that may still be computed by the devices."""

    def __init__(self, named: Sequence[Named]) -> None:
        """Begin to measure. The tensors may change as soon as this returns."""
        self.kept_by = [each.kept_by for each in named]
        self._about = [
            (
                each.kind,
                each.name,
                each.tensor.numel(),
                str(each.tensor.dtype)[6:],
                each.parameter,
                each.source,
            )
            for each in named
        ]
        by_device = grouped((each.tensor.device, index) for index, each in enumerate(named))
        # An optimizer on an accelerator keeps some of its states on the CPU.
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            self._parts = [
                _UnreadPart(device, {index: named[index].tensor.detach() for index in indices})
                for device, indices in by_device.items()
            ]

    def read(self) -> list[Measure]:
        """Return the measures, in the order of the tensors. Waits for the devices."""
        found: dict[int, tuple[int, list[float]]] = {}
        for part in self._parts:
            found |= part.read()
        measures = []
        for index, (kind, name, items, dtype, *more) in enumerate(self._about):
            digest, (norm, total, nans, infs) = found[index]
            mean = total / items if items else 0.0
            measures.append(
                Measure(kind, name, digest, items, dtype, norm, mean, int(nans), int(infs), *more)
            )
        return measures


class _UnreadPart:
    """Hashes and statistics of the tensors on one device, by number: the CPU's longer ones are
    measured one by one, while they are in the processor's cache, all others together.
    """

    def __init__(self, device: torch.device, tensors: Mapping[int, torch.Tensor]) -> None:
        self._found: dict[int, tuple[int, list[float]]] = {}
        together = {}
        for index, tensor in tensors.items():
            if device.type == "cpu" and tensor.numel() * tensor.element_size() > 4 * TINY:
                self._found[index] = int(_digest(tensor)) & MASK, _statistics(tensor)
            else:
                together[index] = tensor
        self._batches = measure_together(together, _columns_of(device))
        self._ready = _event(device, blocking=True)
        if self._ready is not None:
            # They may have been made on another stream, and be freed before this one reads them.
            stream = torch.get_device_module(device).current_stream(device)
            for tensor in tensors.values():
                tensor.record_stream(stream)

    def read(self) -> dict[int, tuple[int, list[float]]]:
        """Return the hash and the statistics of each tensor. Waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
        for indices, batch in self._batches:
            self._found.update(zip(indices, batch.read(), strict=True))
        return self._found


def reason_to_skip(tensor: Any) -> str | None:
    """Return why a tensor cannot be compared; None if it can."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, torch.Tensor):
        return "no tensor"
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_quantized:
        return "quantised"
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return "fake"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "transformed by torch.func"
    if is_traceable_wrapper_subclass(tensor):
        return "made of other tensors"
    if not tensor.numel():
        return "empty"
    if tensor.untyped_storage().size() == 0:
        return "freed"
    return None


def versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return how often each tensor was written to; None where that is unknown."""
    return [None if each.is_inference() else each._version for each in tensors]


def _event(device: torch.device, *, blocking: bool = False) -> Any:
    """Return an event behind all that was begun on a device; None for the CPU, which is done.

    Args:
        device: the device.
        blocking: a thread that waits for it sleeps, where the device can do that.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    event = module.Event(blocking=True) if blocking and device.type == "cuda" else None
    return module.current_stream(device).record_event(event)


def hash_without_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of a tensor, as a signed scalar; 1 if it has NaN, whose bits mean nothing."""
    with torch.no_grad():
        tensor = tensor.detach()
        digest = _digest(tensor)
        if tensor.dtype not in WITH_STATISTICS:
            return digest
        return torch.where(torch.isnan(tensor).any(), torch.ones_like(digest), digest)


# --- the hash


class _Weights(NamedTuple):
    """Weights on a device. They are never freed: any stream may still read them."""

    values: torch.Tensor
    ready: Any  # the event behind their copy, on the stream that made it; None for the CPU


_columns: dict[torch.device, _Weights] = {}
_rows: dict[torch.device, list[_Weights]] = {}  # the longest last


def _weights(values: Sequence[int], device: torch.device) -> _Weights:
    weights = torch.tensor([signed(value) for value in values])
    if device.type != "cpu":
        # A copy of memory that is not pinned would wait for the stream.
        weights = weights.pin_memory().to(device, non_blocking=True)
    return _Weights(weights, _event(device))


def _usable(weights: _Weights) -> torch.Tensor:
    """Return the weights once this stream may read them."""
    if weights.ready is not None:
        weights.ready.wait()
    return weights.values


def _columns_of(device: torch.device) -> torch.Tensor:
    columns = _columns.get(device)
    if columns is None:
        columns = _columns[device] = _weights(column_weights(), device)
    return _usable(columns)


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of a tensor's bytes, as a signed scalar; see ``weights.py``."""
    words = _words(tensor)
    device, count = words.device, words.numel()
    columns = _columns_of(device)
    if count <= ROW:
        return _weighted_sum(words, columns[:count])
    rows = -(-count // ROW)
    of_rows = _rows.setdefault(device, [])
    if not of_rows or len(of_rows[-1].values) < rows:
        of_rows.append(_weights(row_weights(2 * rows), device))
    return _weighted_sum(_sums_of_rows(words, columns), _usable(of_rows[-1])[:rows])


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
        sums.append(_weighted_sum(values[whole * ROW :], columns[:rest]))
    return torch.stack(sums)


def _weighted_sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of words times weights, modulo 2**64."""
    if words.device.type == "cpu":
        return torch.dot(words.to(torch.int64), weights)
    return (words * weights).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 32-bit words, the last one filled up with zeros."""
    parts = elements_of(tensor)
    size = parts.element_size()
    if size == 4:
        return parts
    if missing := -parts.numel() * size % 4:
        parts = torch.nn.functional.pad(parts, (0, missing // size))
    elif parts.storage_offset() * size % 4:
        parts = parts.clone()
    return parts.view(torch.int32)


# --- statistics


def _statistics(tensor: torch.Tensor) -> list[float]:
    """Return the norm, sum, and numbers of NaN and infinite elements of a tensor of the CPU."""
    if tensor.dtype not in WITH_STATISTICS:
        return [0.0, 0.0, 0.0, 0.0]
    # the norm of half a tensor may be too large for its type
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    norm = float(torch.linalg.vector_norm(tensor, dtype=wide))
    total = float(tensor.sum(dtype=wide))
    if math.isfinite(norm):
        return [norm, total, 0.0, 0.0]
    return [norm, total, float(torch.isnan(tensor).sum()), float(torch.isinf(tensor).sum())]
