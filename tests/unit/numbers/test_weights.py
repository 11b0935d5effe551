"""The weights of the hash, and the element that explains why two hashes differ."""

from __future__ import annotations

import pytest

from commlens.numbers.weights import (
    MASK,
    ROW,
    LoneWord,
    column_weights,
    lone_word,
    row_weights,
    signed,
)


def contribution(position: int, change: int) -> int:
    """By how much the hash changes if one word does."""
    row, column = divmod(position, ROW)
    return change * column_weights()[column] * row_weights(row + 1)[row] & MASK


def test_weights_are_odd_and_different() -> None:
    weights = [*column_weights(), *row_weights(100)[1:]]
    assert all(weight % 2 for weight in weights)
    assert len(set(weights)) == len(weights)


@pytest.mark.parametrize("position", [0, 5, ROW - 1, ROW, 3 * ROW + 17])
@pytest.mark.parametrize("bit", [0, 12, 31])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_single_bit_is_found(position: int, bit: int, sign: int) -> None:
    difference = contribution(position, sign << bit)
    assert lone_word(difference, 4 * ROW) == LoneWord(position, bit, 1 << bit)


def test_a_single_element_is_found() -> None:
    assert lone_word(contribution(70_000, 123_457), 4 * ROW) == LoneWord(70_000, None, 123_457)


def test_several_elements_are_not_taken_for_one() -> None:
    difference = contribution(3, 123_457) + contribution(70_000, 1 << 9) & MASK
    assert lone_word(difference, 4 * ROW) is None


def test_nothing_is_told_of_empty_or_huge_tensors() -> None:
    assert lone_word(1, 0) is None
    assert lone_word(1, 1 << 40) is None


def test_signed_integers_have_the_same_bits() -> None:
    assert [signed(value) for value in (0, 1, MASK, 1 << 63)] == [0, 1, -1, -(1 << 63)]
