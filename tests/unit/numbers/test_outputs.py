"""The outputs of collectives: the rank on which one differs, and the line that issued it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import number_outputs
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from forked_calls import OnRanks
from number_outputs import AT, ODD
from old_torch import reduce_scatter_over_gloo
from torch.multiprocessing.reductions import StorageWeakRef

from commlens.numbers.outputs import OutputWatch

launches = pytest.mark.launches


def run(on_ranks: OnRanks, fault: str) -> list[dict[str, Any]]:
    return on_ranks(number_outputs.train, fault, world_size=3)


@launches
@reduce_scatter_over_gloo
def test_the_rank_and_the_line_of_an_output_that_differs(on_ranks: OnRanks) -> None:
    results = run(on_ranks, "damaged")
    first = results[0]
    assert first["why"] == ("collective-output", "other-outputs", [ODD], AT, AT - 2)
    assert first["tensor"] == "all_reduce 2"
    assert first["source"].startswith("number_outputs.py:")
    assert len(first["lines"]) == 1  # the parameters differ, too, which follows from it
    assert "output of all_reduce 2 at number_outputs.py" in first["lines"][0]
    assert results[1]["lines"] == results[2]["lines"] == []


@launches
@reduce_scatter_over_gloo
def test_outputs_are_compared_in_sampled_steps_only_and_change_nothing(on_ranks: OnRanks) -> None:
    checked, unchecked = run(on_ranks, "none"), run(on_ranks, "unchecked")
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


@launches
@reduce_scatter_over_gloo
def test_an_output_that_the_program_changed_before_its_wait_is_not_compared(
    on_ranks: OnRanks,
) -> None:
    results = run(on_ranks, "own")
    assert "all_reduce 2" not in results[ODD]["names"][AT - 1]
    assert results[0]["lines"] == []


@pytest.fixture
def watch(two_ranks: None) -> Iterator[OutputWatch]:
    """A watch, in a group whose collectives do nothing."""
    found = OutputWatch()
    found.start()
    yield found
    found.stop()


def test_no_output_is_kept_alive_after_the_wait_for_it(watch: OutputWatch) -> None:
    issued = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD)
    output = functional.wait_tensor(issued)
    storage = StorageWeakRef(output.untyped_storage())
    del issued, output
    assert storage.expired()
    given = torch.ones(8)
    storage = StorageWeakRef(given.untyped_storage())
    dist.all_reduce(given, async_op=True).wait()
    del given
    assert storage.expired()
    assert len(watch.take()) == 2
