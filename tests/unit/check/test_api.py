"""Tests of src/commlens/check/api.py. tests/integration/test_check.py runs whole checks."""

from __future__ import annotations

import pytest

from commlens.check.api import Branches, branches_of, check_plan
from commlens.check.branches import Branch
from commlens.check.run_rank import Plan
from commlens.errors import CommandError


@pytest.mark.parametrize(
    "given",
    [
        {"train.py:81": (True, False), "moe.py:40": [0, 16, 0.5]},
        ["train.py:81=true,false", "moe.py:40=0,16,0.5"],
    ],
    ids=["values", "texts"],
)
def test_branches_are_given_as_values_or_as_texts(given: Branches) -> None:
    assert branches_of(given) == [
        Branch("train.py", 81, (True, False)),
        Branch("moe.py", 40, (0, 16, 0.5)),
    ]


@pytest.mark.parametrize("given", [{"train.py": (True,)}, {"train.py:81": ()}, ["train.py:81"]])
def test_branches_without_a_line_or_answers_are_refused(given: Branches) -> None:
    with pytest.raises(CommandError):
        branches_of(given)


def gathers_objects() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, f"of rank {dist.get_rank()}")


@pytest.mark.launches
def test_a_rank_that_runs_again_counts_once() -> None:
    """Each rank guesses what the others give, so all but the last run at least twice."""
    seen: list[tuple[int, int]] = []
    check_plan(Plan(gathers_objects, 3, timeout_s=60), seen=lambda *each: seen.append(each))
    assert len(seen) > 3 and seen[-1] == max(seen) == (3, 3)
