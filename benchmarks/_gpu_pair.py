"""A training program for two ranks on one GPU, with one fault; gpu_check.py runs it under
``commlens launch``.

    commlens launch --nproc-per-node 2 benchmarks/_gpu_pair.py CASE cuda|cpu BACKEND

NCCL refuses two ranks on one device of one host. Each rank therefore claims to be another host, and
they talk over loopback sockets.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

from _gpu_machine import one_gpu_for_all

STEPS = 8
FAULT_STEP = 4
CULPRIT = 1


def ready(device: str, backend: str, timeout_s: float) -> Any:
    """Join the job and return torch."""
    if device == "cuda":
        os.environ.update(one_gpu_for_all(int(os.environ["RANK"])))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return torch


def train(case: str, device: str, torch: Any) -> None:
    """Train some steps: two collectives and a look at the loss in each."""
    import torch.distributed as dist

    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    gradients, weights = torch.ones(1024, device=device), torch.ones(256, device=device)
    for step in range(STEPS):
        is_struck = step == FAULT_STEP and rank == CULPRIT
        if is_struck and case in ("asleep", "timeout"):
            time.sleep(120)
        if is_struck and case == "size":
            dist.all_reduce(gradients[:512])
        elif is_struck and case == "few":  # so few that NCCL does not notice
            dist.all_reduce(gradients[:4])
        elif step == FAULT_STEP and case == "few":
            dist.all_reduce(gradients[:5])
        elif not (is_struck and case == "skipped"):
            dist.all_reduce(gradients)
        dist.broadcast(weights, 0)
        if case == "order":
            for group in (second, first) if is_struck else (first, second):
                dist.all_reduce(weights, group=group)
                weights[0].item()
        gradients.fill_(1.0)
        loss = weights[0].item()
        if rank == 0:
            print(f"step {step} loss {loss}", flush=True)
    probe = torch.full((4,), float(rank + 1), device=device)
    dist.all_reduce(probe)
    print(f"rank {rank} ended well with {probe[0].item()}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run one case."""
    case, device, backend = sys.argv[1:4]
    torch = ready(device, backend, timeout_s=10.0 if case == "timeout" else 300.0)
    train(case, device, torch)


if __name__ == "__main__":
    main()
