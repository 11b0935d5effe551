"""Training that does not get past its start: ranks do not meet, or do not agree on the groups; and one that shares values in the store."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from commlens.scenarios import lab
from commlens.scenarios.truth import culprit_rank


def is_culprit(name: str) -> bool:
    """Return whether this rank has the fault ``name``, also before it has joined the job."""
    return lab.running() == name and int(os.environ["RANK"]) == culprit_rank(
        int(os.environ["WORLD_SIZE"])
    )


def unpack_dataset() -> None:
    if is_culprit("absent-at-start"):
        time.sleep(lab.STALL_S)  # fault: absent-at-start


def make_halves(world_size: int) -> None:
    lower, upper = list(range(world_size // 2)), list(range(world_size // 2, world_size))
    if is_culprit("new-group-order"):
        dist.new_group(upper)  # fault: new-group-order
        dist.new_group(lower)
    else:
        dist.new_group(lower)
        dist.new_group(upper)


def make_mesh(world_size: int) -> None:
    shape = (2, world_size // 2)
    if is_culprit("mesh-shape"):
        shape = (world_size // 2, 2) if world_size != 4 else (1, 4)
    init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))  # fault: mesh-shape


def share_rate(store: dist.Store, rank: int, step: int) -> float:
    """Let one rank choose the learning rate of a step."""
    if rank != culprit_rank(dist.get_world_size()):
        return float(store.get(f"rate-{step}"))
    if not lab.strikes("unanswered-key", step):
        store.set(f"rate-{step}", "0.05")  # fault: unanswered-key
    return 0.05


def main() -> None:
    unpack_dataset()
    rank, world_size = lab.begin()
    make_halves(world_size)
    make_mesh(world_size)
    store = dist.PrefixStore("rates", dist.distributed_c10d._get_default_store())
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, x, y in lab.batches(rank):
        optimizer.param_groups[0]["lr"] = share_rate(store, rank, step)
        loss = lab.compute_gradients(model, x, y)
        lab.average_gradients(model)
        optimizer.step()
        lab.report(step, loss)
    lab.finish(model)
