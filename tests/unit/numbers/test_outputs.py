"""The outputs of collectives: the rank on which one differs, and the line that issued it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import number_outputs
import torch
from number_outputs import AT, ODD

from commlens.testing import run_on_ranks

pytestmark = pytest.mark.launches


def run(fault: str) -> list[dict[str, Any]]:
    return run_on_ranks(number_outputs.train, fault, world_size=3)


def test_the_rank_and_the_line_of_an_output_that_differs() -> None:
    results = run("damaged")
    first = results[0]
    assert first["why"] == ("collective-output", "other-outputs", [ODD], AT, AT - 2)
    assert first["tensor"] == "all_reduce 2"
    assert first["source"].startswith("number_outputs.py:")
    assert len(first["lines"]) == 1  # the parameters differ, too, which follows from it
    assert "output of all_reduce 2 at number_outputs.py" in first["lines"][0]
    assert results[1]["lines"] == results[2]["lines"] == []


def test_outputs_are_compared_in_sampled_steps_only_and_change_nothing() -> None:
    checked, unchecked = run("none"), run("unchecked")
    for with_checks, without in zip(checked, unchecked, strict=True):
        assert with_checks["lines"] == []
        pairs = zip(with_checks["parameters"], without["parameters"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    of_a_step = [
        "all_reduce 1",
        "all_reduce 2",
        *(f"all_gather 3, tensor {rank}" for rank in range(3)),
        "broadcast 4",
        "all_reduce 5",
    ]
    assert checked[2]["names"] == [[], of_a_step] * 3
    [of_a_pair] = set(checked[0]["names"][1]) - set(of_a_step)
    assert of_a_pair.startswith("all_reduce 1 of group ")


def test_an_output_that_the_program_changed_before_its_wait_is_not_compared() -> None:
    results = run("own")
    assert "all_reduce 2" not in results[ODD]["names"][AT - 1]
    assert results[0]["lines"] == []
