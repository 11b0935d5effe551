"""DistributedDataParallel and the sharded optimizer that goes with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from . import ONLY_GLOO, Program, World, family, training_step
from .models import WIDTH, Stack

SMALL_BUCKET_MB = 0.01


@family(ONLY_GLOO)
def ddp(world: World) -> Program:
    """Several buckets, rebuilt after the first step."""
    model = DistributedDataParallel(Stack(), bucket_cap_mb=SMALL_BUCKET_MB)
    once = training_step(model, torch.randn(4, WIDTH))
    return Program([model], lambda: [*once(), *once(), *once()])


@family(ONLY_GLOO)
def ddp_static_graph(world: World) -> Program:
    model = DistributedDataParallel(
        Stack(), bucket_cap_mb=SMALL_BUCKET_MB, static_graph=True, gradient_as_bucket_view=True
    )
    once = training_step(model, torch.randn(4, WIDTH))
    return Program([model], lambda: [*once(), *once()])


@family(ONLY_GLOO)
def ddp_accumulation(world: World) -> Program:
    """Unused parameters, batch norm's buffers, and gradient accumulation under no_sync."""
    inner = Stack()
    inner.unused = torch.nn.Linear(WIDTH, WIDTH)
    inner.layers.append(torch.nn.BatchNorm1d(WIDTH))
    model = DistributedDataParallel(
        inner, bucket_cap_mb=SMALL_BUCKET_MB, find_unused_parameters=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(2, 4, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        with model.no_sync():
            model(inputs[0]).square().mean().backward()
        loss = model(inputs[1]).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    return Program([model], step)


@family(ONLY_GLOO)
def zero(world: World) -> Program:
    model = DistributedDataParallel(Stack())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2
    )
    once = training_step(model, torch.randn(4, WIDTH))

    def step() -> Sequence[torch.Tensor]:
        outs = []
        for _ in range(2):
            outs += once()
            optimizer.step()
            optimizer.zero_grad()
        return outs

    return Program([model], step)
