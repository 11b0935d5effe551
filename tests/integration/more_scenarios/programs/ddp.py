"""DistributedDataParallel: the all_reduces are issued from C++ during backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commlens.scenarios import lab


def mean_loss(loss: torch.Tensor) -> torch.Tensor:
    losses = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach().view(1))  # fault: ddp-skip-backward
    return torch.cat(losses).mean()


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    step: int,
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    if not lab.strikes("ddp-skip-backward", step):  # "this loss looks odd, skip it"
        loss.backward()
    optimizer.step()
    return mean_loss(loss)


def main() -> None:
    rank, _ = lab.begin()
    model = DistributedDataParallel(lab.small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        loss = train_step(model, optimizer, x, y, step)
        lab.report(step, loss)
    # Delete the reducer before its group: as the last owner, it destroys the group while holding the GIL, and a thread of gloo
    # that has to release a tensor may be waiting for the GIL (a hang seen with torch 2.13 on a busy machine).
    trained = model.module
    del model
    lab.finish(trained)
