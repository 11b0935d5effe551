"""torch.distributed.pipelining: each rank a stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from . import ONLY_GLOO, Program, World, family
from .models import MLP, WIDTH


def pipeline(world: World, schedule_class: type, microbatches: int = 4) -> Program:
    module = MLP()
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    schedule = schedule_class(stage, microbatches, loss_fn=torch.nn.functional.mse_loss)
    x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        outs = []
        for _ in range(2):
            if world.rank == 0:
                schedule.step(x)
            elif world.rank == world.size - 1:
                losses: list[torch.Tensor] = []
                schedule.step(target=target, losses=losses)
                outs += [loss.detach() for loss in losses]
            else:
                schedule.step()
        return outs

    return Program([module], step)


@family(ONLY_GLOO, needs=(2, 13))
def gpipe(world: World) -> Program:
    return pipeline(world, ScheduleGPipe)


@family(ONLY_GLOO, needs=(2, 13))
def one_f_one_b(world: World) -> Program:
    return pipeline(world, Schedule1F1B)
