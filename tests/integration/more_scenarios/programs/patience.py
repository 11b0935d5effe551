"""Data parallel training in which one rank takes long for a good reason while the others wait: nothing is wrong."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import commlens
from commlens.scenarios import lab
from commlens.scenarios.truth import FAULT_STEP, culprit_rank

SLOW_S = 6.0  # twice the stall timeout of the demo and of the tests


def save_checkpoint(model: torch.nn.Module, folder: Path) -> None:
    """Write the model and a large optimizer state, shard by shard, each flushed to the disk before the next."""
    torch.save(model.state_dict(), folder / "model.pt")
    until = time.monotonic() + SLOW_S
    shard = 0
    while time.monotonic() < until:
        with (folder / f"optimizer-{shard % 4}.pt").open("wb") as file:
            torch.save(torch.full((256, 1024), float(shard)), file)
            file.flush()
            os.fsync(file.fileno())
        shard += 1


def compile_for_all_lengths(model: torch.nn.Module) -> None:
    """Compile the model for every batch size of the evaluation, one after the other."""
    has_compiler = any(shutil.which(name) for name in ("g++", "clang++"))
    compiled = torch.compile(
        model, dynamic=False, backend="inductor" if has_compiler else "aot_eager"
    )
    setattr(
        torch._dynamo.config,
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else "cache_size_limit",
        1000,
    )
    until = time.monotonic() + SLOW_S
    size = 3
    while time.monotonic() < until:
        with torch.no_grad():
            compiled(torch.ones(size, 16))
        size += 1


def build_index() -> None:
    """Wait for an external event: this process does nothing, so only the marked block shows that the wait is intended."""
    time.sleep(SLOW_S)


def main() -> None:
    rank, world_size = lab.begin(timedelta(seconds=120))  # compiling takes long on a busy machine
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    name = lab.running()
    with tempfile.TemporaryDirectory(prefix="commlens-scenario-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        for step, x, y in lab.batches(rank):
            loss = lab.compute_gradients(model, x, y)
            lab.average_gradients(model)
            optimizer.step()
            lab.report(step, loss)
            if step == FAULT_STEP:
                if name == "slow-checkpoint" and rank == 0:
                    save_checkpoint(model, Path(folder))
                if name == "slow-compilation" and rank == culprit_rank(world_size):
                    compile_for_all_lengths(model)
                if name == "expect-slow" and rank == culprit_rank(world_size):
                    with commlens.expect_slow("building the index"):
                        build_index()
                dist.barrier()
    lab.finish(model)
