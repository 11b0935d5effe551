"""torch.compile: the whole model, a part of it, and without graph breaks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from . import ONLY_FAKE, SMALL, Program, World, family
from .models import MLP, WIDTH, Stack
from .tensor_parallel import parallel_mlp, tensor_mesh


class Averaged(torch.nn.Module):
    """A layer whose output is averaged over all ranks, differentiably."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor_autograd(self.layer(x), 0, dist.group.WORLD)
        return functional.wait_tensor(gathered) * 2


def steps(model: torch.nn.Module, x: torch.Tensor, count: int = 2) -> Sequence[torch.Tensor]:
    losses = []
    for _ in range(count):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


@family(SMALL)
def compiled_model(world: World) -> Program:
    model = Stack(2)
    mesh = tensor_mesh(world)
    for layer in model.layers:
        parallel_mlp(layer, mesh)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, WIDTH)
    return Program([model], lambda: steps(compiled, x))


@family({"fake": (8,), "gloo": (2,)})
def compiled_part(world: World) -> Program:
    model = Stack(2)
    mesh = tensor_mesh(world)
    for layer in model.layers:
        parallel_mlp(layer, mesh)
    model.layers[1].compile(backend="aot_eager")
    x = torch.randn(4, WIDTH)
    return Program([model], lambda: steps(model, x))


@family(SMALL)
def compiled_fullgraph(world: World) -> Program:
    model = torch.nn.Sequential(Averaged(), MLP(), Averaged())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, WIDTH)
    return Program([model], lambda: steps(compiled, x))


@family(ONLY_FAKE)
def compiled_inductor(world: World) -> Program:
    """Through the real compiler, whose generated code issues the collectives itself."""
    model = torch.nn.Sequential(Averaged(), torch.nn.ReLU())
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(4, WIDTH)
    return Program([model], lambda: steps(compiled, x))
