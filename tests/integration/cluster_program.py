"""A training whose last rank is late once, and is killed later. Each launcher says in its own way
which rank this is.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def load_batch(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:  # one long sleep would end at a known time
        time.sleep(0.1)


def step() -> None:
    dist.all_reduce(torch.ones(4))


def train(late_s: float) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    for _ in range(12):
        step()
        time.sleep(0.1)
    os.write(1, b"trained\n")
    if last:
        load_batch(late_s)
    step()
    time.sleep(0.5)
    if last and late_s:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
    dist.destroy_process_group()


def main() -> None:
    late_s = float(sys.argv[1])
    if "--spawn" in sys.argv:
        torch.multiprocessing.spawn(spawned, (2, late_s), nprocs=2)
        return
    if "SLURM_PROCID" in os.environ:  # as in many training scripts
        os.environ["RANK"], os.environ["WORLD_SIZE"] = (
            os.environ["SLURM_PROCID"],
            os.environ["SLURM_NTASKS"],
        )
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        method = os.environ["MEETING"]
        rank, size = (
            int(os.environ["OMPI_COMM_WORLD_RANK"]),
            int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        )
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    train(late_s)


def spawned(rank: int, size: int, late_s: float) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29533", rank=rank, world_size=size)
    train(late_s)


if __name__ == "__main__":
    main()
