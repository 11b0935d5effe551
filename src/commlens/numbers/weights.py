"""The weights of the hash, and the element that explains why two hashes differ.

A tensor is hashed as 32-bit words: the sum of each word times an odd 64-bit weight of its position,
modulo 2**64. Any one word that differs changes the hash, and two tensors whose words are in another
order have other hashes. The hash is linear: if only the word at position p differs, by d, the
hashes differ by d times the weight of p. So p is the position at which the difference of the hashes
divided by the weight is a small number.

Standard library only, but for :func:`lone_word`, which needs numpy.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

ROW: Final = 1 << 16
"""Words in a row. A row's words have the weights of its columns, and the row has a weight, too."""

MASK: Final = (1 << 64) - 1
_WORDS_MAX: Final = 1 << 30  # searched for the word that differs: 20 s
_BY_CHANCE: Final = 1e-3  # chance that many differing words look like one


class LoneWord(NamedTuple):
    """The only word in which two tensors differ."""

    position: int
    bit: int | None  # the only bit of it that differs
    change: int = 0  # of the word as an integer, without its sign


def column_weights() -> list[int]:
    """Return the weights of the words of a row."""
    return [_weight(number) for number in range(ROW)]


@functools.lru_cache(maxsize=8)
def row_weights(rows: int) -> list[int]:
    """Return the weights of the rows; the first is 1."""
    return [1, *(_weight(ROW + number) for number in range(1, rows))]


def signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits, as torch has them."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def lone_word(difference: int, length: int) -> LoneWord | None:
    """Return the only word that explains the difference of two hashes; None if several must differ,
    or the word is unknown.

    Args:
        difference: of the hashes, modulo 2**64.
        length: of the tensors, in words.
    """
    import numpy as np

    if not 0 < length <= _WORDS_MAX:
        return None
    columns = np.array(column_weights()[: min(length, ROW)], dtype=np.uint64)
    # the inverses of the weights modulo 2**64, by Newton's method
    inverse = columns.copy()  # right in its lowest 3 bits
    with np.errstate(over="ignore"):
        for _ in range(5):
            inverse *= np.uint64(2) - columns * inverse
    best: tuple[int, int] | None = None
    for row in range(-(-length // ROW)):
        weight = _weight(ROW + row) if row else 1
        wanted = np.uint64(difference * pow(weight, -1, 1 << 64) & MASK)
        here = min(ROW, length - row * ROW)
        with np.errstate(over="ignore"):
            found = (inverse[:here] * wanted).view(np.int64)
        at = int(np.argmin(np.abs(found.view(np.int64)).view(np.uint64)))
        change = abs(int(found[at]))
        if best is None or change < best[1]:
            best = row * ROW + at, change
    if best is None:
        return None
    position, change = best
    # Of many differing words, each position would ask for a random change of 64 bits.
    if change >= 1 << 32 or length * (2 * change + 1) > _BY_CHANCE * 2.0**64:
        return None
    bit = change.bit_length() - 1 if change & (change - 1) == 0 else None
    return LoneWord(position, bit, change)


def _weight(number: int) -> int:
    """Return an odd number that looks random: splitmix64 of the position."""
    value = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return (value ^ value >> 31) | 1
