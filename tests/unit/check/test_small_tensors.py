"""Tests of src/commlens/check/small_tensors.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commlens.check.small_tensors import Given, result, unpack


def given(op: str, *values: Any, how: Any = (), splits: Any = (), dtype: Any = None) -> list[Given]:
    """Return what the ranks give, as it comes out of their messages."""
    splits = splits or [()] * len(values)
    return [
        unpack(Given(op, how, True, split, torch.tensor(value, dtype=dtype)).pack())
        for value, split in zip(values, splits, strict=True)
    ]


def taken(ranks: list[Given], *shapes: Any, place: int = 0, dtype: Any = torch.int64) -> Any:
    """Return what a rank gets; None if the tensors do not fit."""
    outputs = [torch.full(shape, 7).to(dtype) for shape in shapes]
    fits = result(ranks, place, outputs)
    assert fits or all((each == torch.tensor(7).to(dtype)).all() for each in outputs)
    return [each.tolist() for each in outputs] if fits else None


@pytest.mark.parametrize(
    ("value", "dtype"), [([[1, -2], [3, 4]], torch.int32), ([], torch.int64), (True, torch.bool)]
)
def test_a_message_holds_a_tensor(value: Any, dtype: torch.dtype) -> None:
    tensor = (
        torch.tensor(value, dtype=dtype).t()
        if value and value is not True
        else torch.tensor(value, dtype=dtype)
    )
    back = unpack(Given("send", (0, 1), False, (), tensor).pack())
    assert (back.op, back.how, back.known, back.splits) == ("send", (0, 1), False, ())
    assert back.tensor.dtype is dtype and torch.equal(back.tensor, tensor)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("MIN", [1, 2]), ("MAX", [3, 5]), ("SUM", [4, 7]), ("PRODUCT", [3, 10])],
)
def test_numbers_are_reduced(name: str, expected: list[int]) -> None:
    assert taken(given("allreduce_", [1, 5], [3, 2], how=(name,)), (2,)) == [expected]


def test_a_sum_wraps_as_on_a_backend() -> None:
    ranks = given("allreduce_", [200], [100], how=("SUM",), dtype=torch.uint8)
    assert taken(ranks, (1,), dtype=torch.uint8) == [[44]]


def test_flags_are_reduced_by_min_and_max_only() -> None:
    for name, expected in (("MIN", [[False]]), ("MAX", [[True]]), ("SUM", None)):
        ranks = given("allreduce_", [True], [False], how=(name,))
        assert taken(ranks, (1,), dtype=torch.bool) == expected


def test_tensors_are_gathered() -> None:
    assert taken(given("allgather_", [1], [3]), (1,), (1,)) == [[1], [3]]
    assert taken(given("_allgather_base_", [1], [3]), (2,)) == [[1, 3]]
    assert taken(given("broadcast_", [4]), (1,), place=1) == [[4]]


def test_each_rank_gets_its_part() -> None:
    assert taken(given("alltoall_base_", [1, 2], [3, 4]), (2,), place=1) == [[2, 4]]
    uneven = given("alltoall_base_", [1, 2, 3], [4, 5], splits=[(1, 2), (2, 0)])
    assert taken(uneven, (3,)) == [[1, 4, 5]]
    assert taken(uneven, (2,), place=1) == [[2, 3]]


@pytest.mark.parametrize(
    "ranks",
    [
        given("allreduce_", [1], how=("SUM",))
        + given("allreduce_", [1], how=("SUM",), dtype=torch.int32),
        given("allreduce_", [1], [1, 2], how=("SUM",)),
        given("allreduce_", [1], [2], how=(None,)),
        given("allgather_", [1], [2, 3]),
        given("alltoall_base_", [1, 2], [4, 5], splits=[(1, 0), (2, 0)]),
        given("alltoall_base_", [1, 2], [4, 5], splits=[(2, 0), (2, 0)]),
        given("broadcast_", [1], dtype=torch.int32),
    ],
)
def test_tensors_that_do_not_fit_give_nothing(ranks: list[Given]) -> None:
    assert taken(ranks, (1,)) is None
