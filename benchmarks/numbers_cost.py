"""Measure what comparing numbers (``--check-numbers``) adds to a step of DDP, or of FSDP2, on two
gloo ranks.

python benchmarks/numbers_cost.py [PAIRS [ddp | fsdp]]

Steps with and without a check take turns. Printed is the median of the ratios, for one step with a
check and for all steps at the default sampling, on the CPU time of the training thread and of the
whole process.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from commlens.model.number_checks import EVERY, NumberChecks

RANKS, WIDTH, WORDS = 2, 256, 1000
CLOCKS = {"thread": time.thread_time, "process": time.process_time, "wall": time.perf_counter}


def measure(rank: int, store: str, pairs: int, how: str) -> None:
    """Train, and print the ratios on rank 1; rank 0 also compares."""
    from commlens.numbers import checks, sampling

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{store}")
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(6)]
    plain = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    model: nn.Module = plain
    if how == "fsdp":
        for module in plain:
            fully_shard(module)
        fully_shard(plain)
    else:
        model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randint(0, WORDS, (8, 64))

    sampling.start(NumberChecks(every=2))

    def step() -> list[float]:
        began = [clock() for clock in CLOCKS.values()]
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [clock() - start for clock, start in zip(CLOCKS.values(), began, strict=True)]

    step(), step()
    times = [(step(), step()) for _ in range(pairs + 1)][1:]
    for index, name in enumerate(CLOCKS):
        ratio = statistics.median(checked[index] / bare[index] for bare, checked in times)
        bare_ms = statistics.median(bare[index] for bare, _ in times) * 1e3
        if rank == 1:
            print(
                f"{name:8} a step takes {bare_ms:7.1f} ms, with a check {ratio:.2f} times as long;"
                f" at every {EVERY}th step {(ratio - 1) / EVERY:+.2%}"
            )
    checks.finish()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    os.environ["OMP_NUM_THREADS"] = "1"
    how = sys.argv[2] if len(sys.argv) > 2 else "ddp"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (str(Path(folder) / "store"), pairs, how), nprocs=RANKS)


if __name__ == "__main__":
    main()
