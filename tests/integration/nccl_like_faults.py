"""Programs that hang where the host runs ahead: ``python nccl_like_faults.py NAME``, in each of
three ranks. Rank 1 is at fault.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = float(os.environ.get("GROUP_TIMEOUT_S", "60"))


def step(x):
    dist.all_reduce(x)


def load_batch():
    time.sleep(600)


def skipped(rank, x):
    """Skip one collective, and go on for 300: the hosts stand in .item() long before the device
    comes there.
    """
    for i in range(300):
        if i == 10 and rank == 1:
            continue
        step(x)
        if i % 10 == 0:
            dist.broadcast(torch.ones(2), 0)
    x.sum().item()


def asleep(rank, x):
    if rank == 1:
        load_batch()
    for _ in range(50):
        step(x)
    x.sum().item()


def other_size(rank, x):
    dist.all_reduce(torch.ones(5 if rank == 1 else 4))
    x.sum().item()


def other_order(rank, x):
    a, b = (dist.new_group([0, 1, 2], group_desc=name) for name in "ab")
    y = torch.ones(4)
    for i in range(21):
        for group in (b, a) if rank == 1 and i == 20 else (a, b):
            dist.all_reduce(x if group is a else y, group=group)
        if i < 20:
            x.sum().item()
    x.sum().item()


def endless_kernel(rank, x):
    import nccl_like

    if rank == 1:
        nccl_like.launch_kernel(None)
    step(x)
    x.sum().item()


def skips_new_group(rank, x):
    """In nccl2, all ranks of the default group meet in new_group, not only the members."""
    if rank == 1:
        load_batch()
    dist.new_group([0, 2])


def late_replay(rank, x):
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    step(x)
    step(x)
    graph.capture_end()
    for i in range(30):
        if rank == 1 and i == 20:
            load_batch()
        graph.replay()
    torch.cpu.synchronize()


def main(name):
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S))
    x = torch.ones(4)
    for _ in range(20):
        step(x)
        x.sum().item()
    globals()[name](dist.get_rank(), x)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
