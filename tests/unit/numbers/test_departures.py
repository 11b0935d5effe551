"""The cause that fits how tensors came to differ."""

from __future__ import annotations

import pytest
import torch

from commlens.numbers.departures import find_lone_word
from commlens.numbers.differences import Difference
from commlens.numbers.measuring import Named, Unread


def difference(
    tensor: torch.Tensor, other: torch.Tensor, name: str = "a", parameter: str = ""
) -> Difference:
    """Two ranks have a tensor differently."""
    named = [Named("parameter", name, each, parameter=parameter) for each in (tensor, other)]
    one, two = Unread(named).read()
    return Difference(("parameter", name), [{0: one}, {1: two}], learned=False)


@pytest.mark.parametrize(
    ("dtype", "words", "bit", "is_hardware"),
    [
        (torch.float32, torch.int32, 30, True),
        (torch.float32, torch.int32, 12, True),
        (torch.float32, torch.int32, 0, False),
        (torch.bfloat16, torch.int16, 6, True),
        (torch.bfloat16, torch.int16, 0, False),
    ],
)
@pytest.mark.parametrize("element", [6, 7])
def test_the_last_bits_differ_by_rounding(
    dtype: torch.dtype, words: torch.dtype, bit: int, is_hardware: bool, element: int
) -> None:
    tensor = torch.randn(100).to(dtype)
    flipped = tensor.clone()
    flipped.view(words)[element] ^= 1 << bit
    assert (find_lone_word([difference(tensor, flipped)]) is not None) == is_hardware


def test_two_tensors_are_no_lone_word() -> None:
    tensor = torch.ones(10)
    flipped = tensor.clone()
    flipped[3] = 2.0
    assert find_lone_word([difference(tensor, flipped)]) is not None
    both = [difference(tensor, flipped), difference(tensor, flipped, "b")]
    assert find_lone_word(both) is None


def test_the_states_of_one_element_are_one() -> None:
    tensor = torch.ones(10)
    flipped = tensor.clone()
    flipped[3] = 2.0
    both = [
        difference(tensor, flipped, "exp_avg of a", "a"),
        difference(tensor, flipped, "exp_avg_sq of a", "a"),
    ]
    found = find_lone_word(both)
    assert found is not None
    assert found.position == 3
