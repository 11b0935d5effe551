"""Tests of ``commlens check`` on scripts that data decides, and on worlds of many ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """\
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
    print(f"loss {loss.mean().item():.2f}")
    if loss.sum() > 1e6:  # nobody knows it
        if rank == 2:
            dist.barrier()
"""
LINE = 1 + SCRIPT.splitlines().index("    if loss.sum() > 1e6:  # nobody knows it")


def check(folder: Path, *arguments: str, world_size: int = 3) -> tuple[int, Any, str]:
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "commlens", "check", "--json"),
            *("--world-size", str(world_size), *arguments, "train.py"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_what_one_rank_knows_decides_on_all(tmp_path: Path) -> None:
    status, verdict, _ = check(tmp_path)
    assert status == 0
    assert verdict["looked_at"].startswith("3 ranks, 15 records")  # the third epoch is the last
    (limit,) = verdict["missing_evidence"]
    assert f"train.py:{LINE} (false)" in limit


def test_a_fault_on_the_other_branch_is_found(tmp_path: Path) -> None:
    status, verdict, _ = check(tmp_path, "--branch", f"train.py:{LINE}=false,true")
    assert status == 1
    assert verdict["culprits"] == [2]
    assert f"train.py:{LINE} is true" in verdict["summary"]


def test_a_line_without_a_question_is_refused(tmp_path: Path) -> None:
    status, _, error = check(tmp_path, "--branch", "train.py:2=true")
    assert status == 2
    assert f"train.py:{LINE}" in error


def test_a_few_ranks_of_many_are_run(tmp_path: Path) -> None:
    status, verdict, _ = check(tmp_path, world_size=48)
    assert status == 0
    assert verdict["looked_at"].startswith("48 ranks, 240 records")
    assert " of 48 ranks were run" in verdict["missing_evidence"][0]
