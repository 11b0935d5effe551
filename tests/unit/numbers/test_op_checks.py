"""The first op with which the ranks of a job part."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import number_ops
import torch
from chosen import long
from number_ops import AT, ODD

from commlens.testing import run_on_ranks

pytestmark = pytest.mark.launches


def run(fault: str) -> list[dict[str, Any]]:
    return run_on_ranks(number_ops.train, fault, world_size=3, timeout_s=110)


@pytest.mark.parametrize(
    ("fault", "departure"),
    [
        ("gradient", "other-inputs"),
        long("lr", "other-arguments"),
        long("outside", "changed-outside"),
    ],
)
def test_the_op_the_rank_and_the_step(fault: str, departure: str) -> None:
    [(found, culprits, step, ops)] = run(fault)[0]["found"]
    assert (found, culprits, step) == (departure, [ODD], AT)
    assert ops == ["aten.add_.Tensor", "" if fault == "outside" else "aten.add_.Tensor"]


def test_a_healthy_job_is_left_as_it_is() -> None:
    checked, unchecked = run("none"), run("unchecked")
    assert [each["lines"] for each in checked] == [[], [], []]
    for one, other in zip(checked, unchecked, strict=True):
        assert torch.equal(one["weight"], other["weight"])


def test_an_op_for_the_log_of_one_rank_is_no_fault() -> None:
    first, *_ = run("log")
    assert first["found"] == []
    [line] = first["lines"]
    assert "rank 2: aten.mul.Tensor at number_ops.py:" in line
    assert "That alone is no fault" in line
