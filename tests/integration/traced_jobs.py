"""Healthy jobs, for test_trace_jobs.py: ``python traced_jobs.py OUT`` runs each on 4 gloo ranks and
saves OUT/JOB/trace-rankN.json.

Every job creates and destroys its own process group, so a preview can run it too.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bytes_table
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commlens
from commlens.tracing.preview.world import clear_caches

RANKS = 4
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _parallel(model: Blocks, tp: Any = None, dp: Any = None) -> Blocks:
    for layer in model.layers:
        if tp is not None:
            parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if dp is not None:
            fully_shard(layer, mesh=dp)
    if dp is not None:
        fully_shard(model, mesh=dp)
    return model


def _train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def _run_schedule(schedule: Any, first: bool, last: bool, batch: int) -> None:
    given = [torch.randn(batch, WIDTH)] if first else []
    schedule.step(*given, **({"target": torch.randn(batch, WIDTH)} if last else {}))


def tensor_parallel() -> None:
    _train(
        _parallel(
            Blocks(), tp=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        )
    )


def sharded_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    _train(_parallel(Blocks(), mesh["tp"], mesh["dp"]))


def pipeline(schedule: Any = ScheduleGPipe) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Blocks(1), rank, size, torch.device("cpu"))
    _run_schedule(schedule(stage, n_microbatches=4, loss_fn=_loss), rank == 0, rank == size - 1, 8)


def interleaved() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(Blocks(1), rank + size * chunk, 2 * size, torch.device("cpu"))
        for chunk in range(2)
    ]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=size, loss_fn=_loss)
    _run_schedule(schedule, rank == 0, rank == size - 1, 2 * size)


def three_dimensions() -> None:
    """PP x DP x TP."""
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("pp", "dp", "tp")
    )
    model = _parallel(Blocks(), mesh["tp"], mesh["dp"])
    place = mesh["pp"].get_local_rank()
    stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=_loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _run_schedule(schedule, place == 0, place == 1, 4)
    optimizer.step()


def every_op() -> None:
    bytes_table.run(dist.get_rank(), dist.get_world_size())


JOBS: dict[str, Callable[[], None]] = {
    "tensor_parallel": tensor_parallel,
    "sharded_tensor_parallel": sharded_tensor_parallel,
    "gpipe": pipeline,
    "1f1b": lambda: pipeline(Schedule1F1B),
    "interleaved": interleaved,
    "three_dimensions": three_dimensions,
    "every_op": every_op,
}


def run(job: Callable[[], None], **group: Any) -> None:
    """Run a job in a process group of its own."""
    # real groups of an earlier job confuse DTensor as much as those of a preview
    clear_caches()
    torch.manual_seed(0)
    dist.init_process_group("gloo", **group)
    job()
    dist.destroy_process_group()


def _as_rank(rank: int, out: Path) -> None:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(RANKS)
    for name, job in JOBS.items():
        folder = out / name
        folder.mkdir(exist_ok=True)

        def traced(job: Callable[[], None] = job, folder: Path = folder) -> None:
            with commlens.trace() as trace:
                job()
            trace.save(folder / f"trace-rank{rank}.json")

        run(traced, init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)


def main(out: Path) -> int:
    """Run all jobs, with one process for each rank, forked after torch has been imported."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.time()
    ranks = []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            status = 1
            try:
                _as_rank(rank, out)
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        ranks.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    print(f"{time.time() - started:.1f} s, {statuses}")
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
