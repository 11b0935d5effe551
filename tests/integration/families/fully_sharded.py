"""FSDP2 and what it is combined with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from . import MIDDLE, Program, World, family, training_step
from .models import WIDTH, Stack
from .tensor_parallel import parallel_mlp


def shard_blocks(model: Stack, mesh: DeviceMesh, **options: object) -> Stack:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@family(MIDDLE, needs=(2, 9))
def fsdp2(world: World) -> Program:
    model = shard_blocks(Stack(), init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",)))
    return Program([model], training_step(model, torch.randn(4, WIDTH)))


@family(needs=(2, 9))
def hsdp(world: World) -> Program:
    shard = 4 if world.size > 4 else world.size // 2 if world.size > 2 else 1
    mesh = init_device_mesh(
        "cpu", (world.size // shard, shard), mesh_dim_names=("replicate", "shard")
    )
    model = shard_blocks(Stack(), mesh)
    return Program([model], training_step(model, torch.randn(4, WIDTH)))


@family({"fake": (8, 1024), "gloo": (4,)}, needs=(2, 9))
def fsdp2_tp(world: World) -> Program:
    tensor = 8 if world.size > 8 else 2
    mesh = init_device_mesh("cpu", (world.size // tensor, tensor), mesh_dim_names=("dp", "tp"))
    model = Stack()
    for layer in model.layers:
        parallel_mlp(layer, mesh["tp"])
    shard_blocks(model, mesh["dp"])
    return Program([model], training_step(model, torch.randn(4, WIDTH)))


@family(needs=(2, 9))
def fsdp2_training(world: World) -> Program:
    """Several steps with clipping and AdamW, accumulation without synchronisation, no resharding
    after forward.
    """
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    model = shard_blocks(Stack(), mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(4, 4, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        norms = []
        for first, second in (inputs[:2], inputs[2:]):
            model.set_requires_gradient_sync(False)
            model(first).square().mean().backward()
            model.set_requires_gradient_sync(True)
            model(second).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(norm.full_tensor())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    return Program([model], step)
