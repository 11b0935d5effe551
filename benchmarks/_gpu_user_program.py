"""A training program as users write it, for GPUs: DDP, ``.cuda()``, ``device_id=``. The checks of
_gpu_jobs.py trace it, preview it and check it.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def main() -> None:
    """Train some steps."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    model = model.cuda() if device.type == "cuda" else model
    device_ids = [local_rank] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        batch = torch.randn(32, 64).to(device, non_blocking=True)
        loss = wrapped(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.3f} on {device}", flush=True)
    if sys.argv[1:] == ["tables"]:
        print_tables(wrapped, batch)
    print("ended well", flush=True)
    dist.destroy_process_group()


def print_tables(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Print the tables of CommDebugMode at all noise levels, and its JSON."""
    from commlens import CommDebugMode

    mode = CommDebugMode()
    with mode:
        model(batch).sum().backward()
    for level in range(4):
        print(f"--- noise level {level}")
        print(mode.generate_comm_debug_tracing_table(noise_level=level))
    mode.generate_json_dump(file_name="tables.json", noise_level=2)
    print(f"--- total {mode.get_total_counts()}")


if __name__ == "__main__":
    main()
