"""Tests of ``commlens check`` on scripts that data decides, and on worlds of many ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCommlens

SCRIPT = """\
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
stop = torch.zeros(1)
for epoch in range(4):
    if rank == 1:
        stop.fill_(epoch == 2)
    dist.broadcast(stop, 1)
    if stop.item():  # rank 1 knows it
        break
    loss = torch.ones(4)
    dist.all_reduce(loss)
    print(f"loss {loss.mean().item():.2f}", file=sys.stderr)
    if loss.sum() > 1e6:  # nobody knows it
        if rank == 2:
            dist.barrier()
"""
LINE = 1 + SCRIPT.splitlines().index("    if loss.sum() > 1e6:  # nobody knows it")


Check = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def check(tmp_path: Path, call_commlens: RunCommlens) -> Check:
    """Calls the command on the script: its status, its verdict and what it printed to stderr."""

    def call(*arguments: str, world_size: int = 3) -> tuple[int, Any, str]:
        (tmp_path / "train.py").write_text(SCRIPT)
        size = str(world_size)
        done = call_commlens("check", "--json", "--world-size", size, *arguments, "train.py")
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    return call


def test_what_one_rank_knows_decides_on_all(check: Check) -> None:
    status, verdict, _ = check()
    assert status == 0
    assert verdict["looked_at"].startswith("3 ranks, 15 records")  # the third epoch is the last
    (limit,) = verdict["missing_evidence"]
    assert f"train.py:{LINE} (false)" in limit


def test_a_fault_on_the_other_branch_is_found(check: Check) -> None:
    status, verdict, _ = check("--branch", f"train.py:{LINE}=false,true")
    assert status == 1
    assert verdict["culprits"] == [2]
    assert f"train.py:{LINE} is true" in verdict["summary"]


def test_a_line_without_a_question_is_refused(check: Check) -> None:
    status, _, error = check("--branch", "train.py:3=true")
    assert status == 2
    assert f"train.py:{LINE}" in error


def test_a_few_ranks_of_many_are_run(check: Check) -> None:
    status, verdict, _ = check(world_size=48)
    assert status == 0
    assert verdict["looked_at"].startswith("48 ranks, 240 records")
    assert " of 48 ranks were run" in verdict["missing_evidence"][0]
