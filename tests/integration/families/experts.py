"""Mixture of experts: tokens travel to the rank that holds their expert and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from . import MIDDLE, Program, World, family, training_step
from .models import MLP, WIDTH


class Experts(torch.nn.Module):
    """One expert on each rank."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.expert = MLP()
        self.gate = torch.nn.Linear(WIDTH, WIDTH)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        splits = [x.shape[0] // self.world.size] * self.world.size
        return all_to_all_single_autograd(x, splits, splits, dist.group.WORLD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(x)
        return x + self.exchange(self.expert(self.exchange(x)))


@family(MIDDLE)
def moe(world: World) -> Program:
    model = torch.nn.Sequential(Experts(world), Experts(world))
    return Program([model], training_step(model, torch.randn(2 * world.size, WIDTH)))
