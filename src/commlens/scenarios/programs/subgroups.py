"""Training over two process groups, which one rank once uses in reverse order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commlens.scenarios import lab


def sync_statistics(value: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(value, group=group)  # fault: swap-two-groups


def main() -> None:
    rank, world_size = lab.begin()
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    everyone = list(range(world_size))
    gradients = dist.new_group(everyone, group_desc="gradients")
    statistics = dist.new_group(everyone, group_desc="statistics")
    for step, x, y in lab.batches(rank):
        loss = lab.compute_gradients(model, x, y)
        shown = loss.detach().clone()
        if lab.strikes("swap-two-groups", step):
            sync_statistics(shown, statistics)
            lab.average_gradients(model, gradients)
        else:
            lab.average_gradients(model, gradients)
            sync_statistics(shown, statistics)
        optimizer.step()
        lab.report(step, shown)
    lab.finish(model)
