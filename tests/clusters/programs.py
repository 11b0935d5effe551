"""Programs of the jobs whose metrics and verdicts are sent."""

from __future__ import annotations

STALLS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    while dist.get_rank() == 1 and os.path.exists("stall"):
        time.sleep(0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ends = torch.tensor(float(os.path.exists("end")))
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if ends:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""
"""Trains. Rank 1 stalls while there is a file named stall, and all end once there is one named end."""

DIES = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10):
    dist.all_reduce(torch.ones(4))
    if step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""Rank 1 dies of SIGKILL."""
