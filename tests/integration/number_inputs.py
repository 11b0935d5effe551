"""Functions for ``on_ranks``: data-parallel models and their inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from listening import listen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


def ranks(_: None = None) -> dict[str, tuple[int, ...]]:
    """Return the ranks that must read other batches than this one, by wrapper."""
    from commlens.numbers import model_inputs

    warnings.simplefilter("ignore")
    found: dict[str, tuple[int, ...]] = {}
    noted: list[tuple[int, ...]] = []
    model_inputs.watch(lambda _module, ranks_of, _inputs: noted.append(ranks_of()))

    def note(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
        noted.clear()
        wrap(nn.Linear(4, 4))(torch.ones(2, 4))
        [found[name]] = noted

    size = dist.get_world_size()
    whole = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    note("ddp", DistributedDataParallel)
    note("fsdp1", lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")))
    note("fsdp2", lambda model: fully_shard(model, mesh=whole))
    square = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    note("hsdp", lambda model: fully_shard(model, mesh=square))
    note("pairs", lambda model: fully_shard(model, mesh=square["inner"]))
    note("with tensor parallel", lambda model: fully_shard(model, mesh=square["outer"]))
    note("with a group inside", lambda model: fully_shard(model, mesh=whole))
    return found


def share_a_batch(_: None = None) -> list[str]:
    """Train with FSDP2. Rank 1 reads rank 0's batches. Return what was logged."""
    from commlens.model.number_checks import NumberChecks
    from commlens.numbers import checks, sampling

    lines = listen().lines
    sampling.start(NumberChecks(every=1))
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = {1: 0}.get(dist.get_rank(), dist.get_rank())
    for step in range(1, 4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + part)
        model(torch.randn(2, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    checks.finish()
    return lines
