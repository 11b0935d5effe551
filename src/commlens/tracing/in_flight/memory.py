"""The bytes that a tensor occupies, known without keeping the tensor alive."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

_COMPARED_MAX: Final = 1 << 24  # bytes that are compared one by one


class Memory:
    """The bytes of a tensor in its storage.

    Two tensors share bytes only if they share a storage. A weak reference to the storage keeps its
    address from being used again, but not its memory.
    """

    __slots__ = ("_itemsize", "_sizes", "_storage", "_strides", "begin", "end", "key")

    def __init__(self, tensor: Any) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.key: int = self._storage.cdata
        self._itemsize: int = tensor.element_size()
        self._sizes, self._strides = tuple(tensor.shape), tuple(tensor.stride())
        self.begin: int = tensor.storage_offset() * self._itemsize
        last = sum(
            (size - 1) * stride for size, stride in zip(self._sizes, self._strides, strict=True)
        )
        self.end = self.begin + (last + 1) * self._itemsize

    @property
    def is_freed(self) -> bool:
        """Whether the storage is gone."""
        return bool(self._storage.expired())

    @property
    def _has_no_gaps(self) -> bool:
        reached = 1  # elements from the first one on, without a gap
        for stride, size in sorted(zip(self._strides, self._sizes, strict=True)):
            if size > 1 and stride > reached:
                return False
            reached += (size - 1) * stride
        return True

    def contains(self, other: Memory) -> bool:
        """Return whether all bytes between the other's first and last belong to this memory."""
        return (
            self.key == other.key
            and self._has_no_gaps
            and self.begin <= other.begin
            and other.end <= self.end
        )

    def shares_bytes_with(self, other: Memory) -> bool:
        """Return whether both have a byte in common. Views with gaps that are too large to be
        compared byte by byte have none.
        """
        if self.key != other.key or self.begin >= other.end or other.begin >= self.end:
            return False
        if self._has_no_gaps and other._has_no_gaps:
            return True
        first, last = min(self.begin, other.begin), max(self.end, other.end)
        if last - first > _COMPARED_MAX:
            return False
        with _disable_current_modes():
            marks = torch.zeros(last - first, dtype=torch.uint8, device="cpu")
            self._view(marks, first).fill_(1)
            return bool(other._view(marks, first).any())

    def _view(self, marks: Any, first: int) -> Any:
        """Return this memory's bytes in ``marks``, which begin at the byte ``first``."""
        return torch.as_strided(
            marks,
            (*self._sizes, self._itemsize),
            (*(stride * self._itemsize for stride in self._strides), 1),
            self.begin - first,
        )


def storage_of(tensor: Any) -> Any:
    """Return a tensor's storage; None for one without: it is sparse, or a wrapper."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def storage_key(tensor: Any) -> int | None:
    """Return the key of a tensor's storage, the same as that of its :class:`Memory`; None for a
    tensor without one.
    """
    storage = storage_of(tensor)
    return None if storage is None else int(storage._cdata)


def memory_of(tensor: Any) -> Memory | None:
    """Return the memory of a tensor; None if it is empty, or not strided."""
    is_known = tensor.layout is torch.strided and tensor.numel() and storage_of(tensor) is not None
    return Memory(tensor) if is_known else None
