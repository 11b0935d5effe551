"""The first op with which the ranks of a job part."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import number_ops
import torch
from chosen import long
from forked_calls import OnRanks
from number_ops import AT, ODD

pytestmark = pytest.mark.launches


def run(on_ranks: OnRanks, fault: str) -> list[dict[str, Any]]:
    return on_ranks(number_ops.train, fault, world_size=3)


@pytest.mark.parametrize(
    ("fault", "departure"),
    [
        ("gradient", "other-inputs"),
        long("lr", "other-arguments"),
        long("outside", "changed-outside"),
    ],
)
def test_the_op_the_rank_and_the_step(on_ranks: OnRanks, fault: str, departure: str) -> None:
    [(found, culprits, step, ops)] = run(on_ranks, fault)[0]["found"]
    assert (found, culprits, step) == (departure, [ODD], AT)
    assert ops == ["aten.add_.Tensor", "" if fault == "outside" else "aten.add_.Tensor"]


def test_a_healthy_job_is_left_as_it_is(on_ranks: OnRanks) -> None:
    checked, unchecked = run(on_ranks, "none"), run(on_ranks, "unchecked")
    assert [each["lines"] for each in checked] == [[], [], []]
    for one, other in zip(checked, unchecked, strict=True):
        assert torch.equal(one["weight"], other["weight"])


def test_an_op_for_the_log_of_one_rank_is_no_fault(on_ranks: OnRanks) -> None:
    first, *_ = run(on_ranks, "log")
    assert first["found"] == []
    [line] = first["lines"]
    assert "rank 2: aten.mul.Tensor at number_ops.py:" in line
    assert "That alone is no fault" in line
