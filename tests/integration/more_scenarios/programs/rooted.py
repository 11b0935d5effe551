"""Rank 0 broadcasts and then sets a key in the store, on which the others join. This is legal: a root need not wait."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from commlens.scenarios import lab


def agree_on_rate(store: dist.Store, rank: int, step: int) -> float:
    rate = torch.tensor([0.01 / (1 + step)]) if rank == 0 else torch.zeros(1)
    if rank == 0:
        work = dist.broadcast(rate, src=0, async_op=True)
        store.set(f"rate-{step}", "sent")
        assert work is not None
        work.wait()
    else:
        store.wait([f"rate-{step}"], timedelta(seconds=20))
        dist.broadcast(rate, src=0)
    return float(rate)


def main() -> None:
    rank, _ = lab.begin()
    store = dist.PrefixStore("rates", dist.distributed_c10d._get_default_store())
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        loss = lab.compute_gradients(model, x, y)
        dist.all_reduce(lab.flat_gradients(model))
        optimizer.param_groups[0]["lr"] = agree_on_rate(store, rank, step)
        optimizer.step()
        lab.report(step, loss)
    lab.finish(model)
