"""Whom the verdict on a job of real gloo ranks blames, and by what that is decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from harness import Harness

from commlens import diagnose

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.timeout(120)

START = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size, ones = dist.get_rank(), dist.get_world_size(), torch.ones(4)
"""

OWN_SPLITS = """
splits = [2, 2] if rank == 1 else [1, 1]
dist.all_to_all_single(torch.empty(2), torch.ones(2), splits, splits)
"""

ONE_ENDS_BEFORE_A_BROADCAST = """
dist.all_reduce(ones)
if rank != 2:
    dist.broadcast(ones, 0)
dist.destroy_process_group()
"""

ONE_MORE_AT_THE_END = """
for _ in range(3):
    dist.all_reduce(ones)
if rank == 0:
    dist.all_reduce(ones)
dist.destroy_process_group()
"""

ACROSS_GROUPS = """
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
dist.recv(ones, 1 - rank, group=(first, second)[rank])
dist.send(ones, 1 - rank, group=(second, first)[rank])
"""

NO_ANSWER = """
for step in range(3):
    if rank == 0:
        dist.send(ones, 1)
        dist.recv(ones, 1)
    else:
        dist.recv(ones, 0)  # line 9
        if step < 2:
            dist.send(ones, 0)
dist.destroy_process_group()
"""

WRONG_WAY = """
away, home = (rank - 1) % size, (rank + 1) % size
if rank != 2:
    away, home = home, away
sent, received = dist.isend(ones, away), dist.irecv(torch.empty(4), home)  # line 7
sent.wait()
received.wait()
dist.destroy_process_group()
"""


def findings(folder: Path, jobs: Harness, program: str, size: int) -> list[dict[str, Any]]:
    """Return the findings in the job's last dump."""
    result = jobs.run_program(START.lstrip() + program.lstrip(), size, folder)
    assert result.dump is not None, result
    found: list[dict[str, Any]] = json.loads(diagnose(result.dump).to_json())["findings"]
    assert [finding["root_cause"] for finding in found].count(True) == 1, result
    return found


def test_a_rank_whose_splits_do_not_fit_its_own_tensors(tmp_path: Path, jobs: Harness) -> None:
    first, *others = findings(tmp_path, jobs, OWN_SPLITS, 2)
    if TORCH >= (2, 14):  # the call fails before the rank issues anything
        assert (first["kind"], first["culprits"]) == ("dead", [1])
        assert "Split sizes" in first["summary"]
        return
    assert (first["kind"], first["culprits"], first["confidence"]) == (
        "mismatch/splits",
        [1],
        "high",
    )
    assert first["cause"]["blamed_by"] == "arguments"
    assert {other["kind"] for other in others} <= {"dead"}


def test_a_rank_that_is_done_with_a_broadcast_came_to_it(tmp_path: Path, jobs: Harness) -> None:
    [found] = findings(tmp_path, jobs, ONE_ENDS_BEFORE_A_BROADCAST, 3)
    cause = found["cause"]
    assert (found["kind"], found["culprits"], cause["came"]) == ("missing", [2], [0, 1])
    assert "alone" not in found["next_step"]


def test_one_collective_more_at_the_end_is_the_root_cause(tmp_path: Path, jobs: Harness) -> None:
    [found] = findings(tmp_path, jobs, ONE_MORE_AT_THE_END, 3)
    assert (found["kind"], found["culprits"]) == ("missing", [0])
    assert found["cause"]["outcome"] == "extra-collective"


def test_a_cycle_across_groups_names_the_group_of_each_message(
    tmp_path: Path, jobs: Harness
) -> None:
    [found] = findings(tmp_path, jobs, ACROSS_GROUPS, 2)
    assert (found["kind"], found["culprits"]) == ("cycle", [])
    assert [wait["group"]["name"] for wait in found["cause"]["ring"]] == ["1", "2"]
    for message in ("recv #1 from rank 1 of group 1", "recv #1 from rank 0 of group 2"):
        assert message in found["explanation"]


def test_a_rank_that_ends_after_a_receive_and_sends_no_answer(
    tmp_path: Path, jobs: Harness
) -> None:
    [found] = findings(tmp_path, jobs, NO_ANSWER, 2)
    assert (found["kind"], found["culprits"], found["source"]) == ("missing", [1], "train.py:9")
    assert (found["cause"]["blamed_by"], found["confidence"]) == ("midway", "medium")


def test_a_rank_that_goes_round_a_ring_the_wrong_way(tmp_path: Path, jobs: Harness) -> None:
    first, *_ = findings(tmp_path, jobs, WRONG_WAY, 4)
    assert (first["kind"], first["culprits"], first["source"]) == (
        "mismatch/p2p",
        [2],
        "train.py:7",
    )
