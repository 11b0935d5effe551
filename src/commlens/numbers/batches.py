"""Hashes and statistics of many tensors at once, with few kernels.

The tensors of one type are put one behind the other, each filled up with zeros to whole lines:
zeros change neither a hash nor a sum. The device reduces each line, and the thread that reads adds
up the lines of each tensor. Integers are added exactly, so a hash does not depend on the tensors
that are measured with it.

Three tensors of 500, 2,000 and 300 words on a GPU, for example, become four lines of 1,024 words:
one, two and one. The device sums up each line; the hash of the second tensor is the sum of two
lines.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from commlens.model.grouping import grouped
from commlens.numbers.weights import MASK, ROW, row_weights

WITH_STATISTICS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TINY: Final = 16  # words: a line of tensors on the CPU
_SHORT: Final = 1024  # words: a line of tensors that are not longer than a row
_WORDS_AT_ONCE: Final = 128 * ROW  # 64 MiB of products, beside 32 MiB of words


class Key(NamedTuple):
    """The properties that are equal for tensors that are measured together."""

    dtype: torch.dtype | None  # of those with statistics
    size: int  # of an element, in bytes; 4 at most
    line: int  # words


_ElementRun = tuple[torch.Tensor, int, int]
"""Elements of one tensor from the beginning of a line on, the line's number in its row, and the
number of lines.
"""


class Batch:
    """Tensors of one key that are being measured."""

    def __init__(self, key: Key, tensors: Sequence[torch.Tensor], columns: torch.Tensor) -> None:
        """Begin to measure.

        Args:
            key: of all of the tensors.
            tensors: their elements, by :func:`elements_of`.
            columns: the weights of a row's words, on the device.
        """
        self._line = key.line
        self._lines = [_lines(key, each.numel()) for each in tensors]
        weights = columns.view(-1, key.line)
        zeros = tensors[0].new_zeros(key.line * 4 // key.size)
        hashes, statistics = [], []
        for runs in _chunks(key, tensors):
            lines = _fill(key, runs, zeros)
            words, of_lines = lines.view(torch.int32), _weights(runs, weights)
            # Weights of several lines are a copy, and overwritten.
            products = words * of_lines if len(of_lines) == 1 else of_lines.mul_(words)
            hashes.append(products.sum(1))
            if key.dtype is not None:
                statistics.append(_statistics(lines.view(key.dtype)))
        self._hashes = to_cpu(torch.cat(hashes))
        self._statistics = to_cpu(torch.cat(statistics, 1)) if statistics else None

    def read(self) -> Iterator[tuple[int, list[float]]]:
        """Yield the hash of each tensor, and its norm, sum, and numbers of NaN and infinite
        elements. The device must be done.
        """
        hashes = self._hashes.tolist()
        statistics = self._statistics.tolist() if self._statistics is not None else []
        weights: Iterable[int] = itertools.repeat(1)
        if self._line == ROW:
            weights = row_weights(max(self._lines, default=0))
        first = 0
        for lines in self._lines:
            here = slice(first, first + lines)
            digest = sum(map(operator.mul, hashes[here], weights))
            of_tensor = [0.0, 0.0, 0.0, 0.0]
            if statistics:
                norms, *sums = (each[here] for each in statistics)
                norm = norms[0] if lines == 1 else math.hypot(*norms)
                of_tensor = [norm, *map(sum, sums)]
            yield digest & MASK, of_tensor
            first += lines


def key_of(tensor: torch.Tensor) -> Key:
    """Return the key of a tensor."""
    size = min(4, tensor.element_size())
    dtype = tensor.dtype if tensor.dtype in WITH_STATISTICS else None
    if tensor.device.type == "cpu":
        return Key(dtype, size, TINY)
    words = -(-tensor.numel() * tensor.element_size() // 4)
    return Key(dtype, size, _SHORT if words <= ROW else ROW)


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers, of 32 bits at most, one after the other."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32))


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor to the CPU, without waiting for the device."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _lines(key: Key, elements: int) -> int:
    return -(-elements * key.size // (4 * key.line))


def _chunks(key: Key, tensors: Sequence[torch.Tensor]) -> Iterator[list[_ElementRun]]:
    """Yield the tensors that are measured at once: whole lines, of bounded size."""
    room = most = _WORDS_AT_ONCE // key.line
    in_line = key.line * 4 // key.size
    runs: list[_ElementRun] = []
    for tensor in tensors:
        first, lines = 0, _lines(key, tensor.numel())
        while first < lines:
            count = min(room, lines - first)
            elements = tensor[first * in_line : (first + count) * in_line]
            runs.append((elements, first, count))
            first += count
            room -= count
            if not room:
                yield runs
                runs, room = [], most
    if runs:
        yield runs


def _fill(key: Key, runs: Sequence[_ElementRun], zeros: torch.Tensor) -> torch.Tensor:
    """Return the elements of some runs, line by line, each run filled up with zeros."""
    pieces = []
    in_line = len(zeros)
    for elements, _, lines in runs:
        pieces.append(elements)
        if missing := lines * in_line - len(elements):
            pieces.append(zeros[:missing])
    is_ready = len(pieces) == 1 and not pieces[0].storage_offset() * key.size % 8
    return (pieces[0] if is_ready else torch.cat(pieces)).view(-1, in_line)


def _weights(runs: Sequence[_ElementRun], weights: torch.Tensor) -> torch.Tensor:
    """Return the weights of each line; one line if they are the same for all."""
    # A tensor of more than one row has lines as long as rows.
    if len(weights) == 1 or all((column, lines) == (0, 1) for _, column, lines in runs):
        return weights[:1]
    return torch.cat([weights[column : column + lines] for _, column, lines in runs])


def _statistics(numbers: torch.Tensor) -> torch.Tensor:
    """Return the norms of the lines, their sums, and their numbers of NaN and infinite elements."""
    wide = torch.float64 if numbers.dtype == torch.float64 else torch.float32
    return torch.stack(
        [
            torch.linalg.vector_norm(numbers, dim=1, dtype=wide),
            numbers.sum(1, dtype=wide),
            torch.isnan(numbers).sum(1, dtype=wide),
            torch.isinf(numbers).sum(1, dtype=wide),
        ]
    )


def measure_together(
    tensors: Mapping[int, torch.Tensor], columns: torch.Tensor
) -> list[tuple[list[int], Batch]]:
    """Begin to measure tensors of one device. Return the tensors' numbers with each batch."""
    by_key = grouped((key_of(tensor), index) for index, tensor in tensors.items())
    return [
        (indices, Batch(key, [elements_of(tensors[index]) for index in indices], columns))
        for key, indices in by_key.items()
    ]
