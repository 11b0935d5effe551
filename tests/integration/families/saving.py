"""Distributed checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from . import ONLY_GLOO, Program, World, family
from .models import MLP, WIDTH
from .tensor_parallel import parallel_mlp, tensor_mesh


@family(ONLY_GLOO)
def save_and_load(world: World) -> Program:
    model = parallel_mlp(MLP(), tensor_mesh(world))
    names = [tempfile.mkdtemp(prefix="commlens-dcp-") if world.rank == 0 else ""]
    dist.broadcast_object_list(names)
    folder = Path(names[0])

    def step() -> Sequence[torch.Tensor]:
        model(torch.ones(4, WIDTH)).sum().backward()
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "step")
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder / "step")
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
        return []

    return Program([model], step)
