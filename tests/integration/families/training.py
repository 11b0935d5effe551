"""What happens around forward and backward: accumulation, optimizers, clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import Program, World, family
from .models import MLP, WIDTH, Stack
from .tensor_parallel import parallel_mlp, tensor_mesh


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@family()
def accumulation(world: World) -> Program:
    """Three micro-batches, one optimizer step, twice."""
    model = parallel_mlp(MLP(), tensor_mesh(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(6, 4, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        losses = []
        for half in (inputs[:3], inputs[3:]):
            for x in half:
                loss = model(x).square().mean() / 3
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return Program([model], step)


@family()
def clipping(world: World) -> Program:
    model, mesh = Stack(2), tensor_mesh(world)
    for layer in model.layers:
        parallel_mlp(layer, mesh)
    x = torch.randn(4, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        model(x).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return [norm.full_tensor() if isinstance(norm, DTensor) else norm]

    return Program([model], step)


class AveragingSGD(torch.optim.SGD):
    """An optimizer that communicates: it averages gradients over all ranks in its step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= dist.get_world_size()
        super().step(closure)


@family()
def communicating_optimizer(world: World) -> Program:
    model = MLP()
    optimizer = AveragingSGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return []

    return Program([model], step)
