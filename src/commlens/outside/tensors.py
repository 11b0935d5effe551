"""Read a tensor's shape and dtype from the memory of another process, given the address of its
Python object.

The place of these fields differs between torch's versions, so they are searched for: the number of
dimensions, the sizes, the strides, the storage offset and the number of elements follow one another
in ``TensorImpl`` (tried with torch 2.13), and the number of elements must be the product of the
sizes. Where nothing fits, or two places do, nothing is said. Tensors of more than five dimensions
hold their sizes elsewhere.
"""

from __future__ import annotations

import math
import os
import struct
from typing import Final

_INLINE: Final = 5  # dimensions that TensorImpl holds itself
_WORDS: Final = 40
_FIRST, _LAST = 4, 16  # words at which the number of dimensions is searched for
_POINTERS: Final = (16, 24, 32)  # of the Python object, at which TensorImpl's address may be
_SIZE_MAX: Final = 1 << 48
_DTYPES: Final = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "bool",
    "qint8",
    "quint8",
    "qint32",
    "bfloat16",
)
"""By c10::ScalarType."""


def tensor_words(pid: int, address: int) -> str:
    """Return a tensor's dtype and shape, such as ``"float32[1024, 16]"``; empty if they cannot be
    read.
    """
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = {words for offset in _POINTERS if (words := _at(memory, address + offset))}
    finally:
        os.close(memory)
    return found.pop() if len(found) == 1 else ""


def _at(memory: int, pointer: int) -> str:
    """Return the tensor whose TensorImpl is pointed to, or an empty text."""
    try:
        (impl,) = struct.unpack("=Q", os.pread(memory, 8, pointer))
        if impl % 8 or not 4096 < impl < 1 << 48:
            return ""
        words = struct.unpack(f"={_WORDS}q", os.pread(memory, 8 * _WORDS, impl))
    except (OSError, struct.error, OverflowError):
        return ""
    found = {text for start in range(_FIRST, _LAST) if (text := _sizes_at(words, start))}
    return found.pop() if len(found) == 1 else ""


def _sizes_at(words: tuple[int, ...], start: int) -> str:
    dimensions = words[start]
    sizes = words[start + 1 : start + 1 + dimensions] if 1 <= dimensions <= _INLINE else ()
    strides = words[start + 1 + _INLINE : start + 1 + _INLINE + len(sizes)]
    offset, numel, dtype = words[start + 1 + 2 * _INLINE : start + 4 + 2 * _INLINE]
    if not sizes or not all(0 < size < _SIZE_MAX for size in sizes) or numel != math.prod(sizes):
        return ""
    if (
        not all(0 <= stride < _SIZE_MAX for stride in strides)
        or not 0 <= offset < _SIZE_MAX
        or dtype & 0xFFFF >= len(_DTYPES)
    ):
        return ""
    return f"{_DTYPES[dtype & 0xFFFF]}[{', '.join(map(str, sizes))}]"
