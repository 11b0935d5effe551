"""A hand-written two-dimensional mesh: statistics are summed along rows, gradients are averaged along columns."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from commlens.scenarios import lab

metrics_lock = threading.Lock()


def record_metrics(loss: torch.Tensor, step: int) -> None:
    """A lock that is taken twice: the classic deadlock within one process."""
    if lab.strikes("mesh-cascade", step):
        metrics_lock.acquire()
    if metrics_lock.acquire(timeout=lab.STALL_S):  # fault: mesh-cascade
        metrics_lock.release()


def main() -> None:
    rank, world_size = lab.begin()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("column", "row"))
    rows, columns = mesh.get_group("row"), mesh.get_group("column")
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        loss = lab.compute_gradients(model, x, y)
        record_metrics(loss, step)
        shown = loss.detach().clone()
        dist.all_reduce(shown, group=rows)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=columns)
        optimizer.step()
        lab.report(step, shown)
    lab.finish(model)
