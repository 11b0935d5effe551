"""Latent faults of a program that ends well: told once at its end, on real gloo ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chosen import NATIVE_FIRST

pytest.importorskip("torch")

from conftest import RunCommlens

pytestmark = pytest.mark.timeout(150)

FAULTY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, ones = dist.get_rank(), torch.ones(4)
first = dist.new_group([0])
for _ in range(3):
    dist.all_reduce(torch.ones(4), async_op=True)  # line 6
kept = dist.broadcast(ones, 0, async_op=True)  # line 7
message = dist.isend(ones, 1) if rank == 0 else dist.recv(ones, 0)  # line 8
dist.all_reduce(ones, group=first)  # line 9
for _ in range(20):
    dist.new_group([0, 1])  # line 11
dist.barrier()
dist.destroy_process_group()
"""

LEGAL = """
import torch, torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
dist.init_process_group("gloo")
rank, ones = dist.get_rank(), torch.ones(4)
for _ in range(3):
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(4)]
    dist.barrier()  # polls them: what was found done is waited for all the same
    for work in works:
        work.wait()
    dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
    polled = dist.all_reduce(torch.ones(4), async_op=True)
    while not polled.is_completed():
        pass
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ones, 1 - rank), dist.P2POp(dist.irecv, torch.ones(4), 1 - rank)]
    ):
        work.wait()
    functional.all_reduce(ones, "sum", dist.group.WORLD) + 1
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(3):
    model(ones).sum().backward()
model.register_comm_hook(None, default_hooks.allreduce_hook)
for _ in range(3):
    model(ones).sum().backward()
if rank == 0:
    dist.all_reduce(ones, group=dist.new_group([0]))
else:
    dist.new_group([0])
dist.destroy_process_group()
"""


def told(output: str) -> list[str]:
    return [
        line
        for line in output.splitlines()
        if re.match(r"commlens: .* at train.py|commlens: train.py", line)
    ]


def test_each_is_told_once(
    tmp_path: Path, run_commlens: RunCommlens, engine_environment: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(FAULTY.lstrip())
    ended = run_commlens(
        "launch", "--nproc-per-node", "2", "train.py", environ=engine_environment, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    lines = told(ended.stderr)
    assert len(lines) == 5, ended.stderr
    for start in (
        "all_reduce at train.py:6 <module> is asynchronous, and 3 Works of it were never waited",
        "broadcast at train.py:7 <module> is asynchronous, and 1 Work of it was never waited",
        "isend at train.py:8 <module> is asynchronous, and 1 Work of it was never waited",
        "all_reduce at train.py:9 <module> was called 1 time with a group that the rank is not in",
        "train.py:11 <module> made 20 groups of ranks [0, 1] that were never destroyed",
    ):
        assert sum(start in line for line in lines) == 1, (start, lines)


@NATIVE_FIRST
def test_there_is_none_in_a_legal_program(
    tmp_path: Path, run_commlens: RunCommlens, engine_environment: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(LEGAL.lstrip())
    ended = run_commlens(
        "launch", "--nproc-per-node", "2", "train.py", environ=engine_environment, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert told(ended.stderr) == []
