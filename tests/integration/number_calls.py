"""Functions for ``on_ranks``: checks that a program asks for itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from listening import listen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import commlens
from commlens.errors import CommandError
from commlens.testing import assert_replicas_agree


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after one step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def flip(tensor: torch.Tensor) -> None:
    tensor.data.view(torch.int32)[0, 5] ^= 1 << 9


def compare_model(_: None = None) -> dict[str, Any]:
    """Compare a model that agrees, then one in which a bit differs on rank 2."""
    model, optimizer = trained()
    before = commlens.check_numbers(model, optimizer)
    assert_replicas_agree(model, optimizer)
    if dist.get_rank() == 2:
        flip(model.module[0].weight)
    after = commlens.check_numbers(model, optimizer)
    again = commlens.check_numbers(model, optimizer)
    raised = ""
    try:
        assert_replicas_agree(model)
    except AssertionError as error:
        raised = str(error)
    cause: Any = after.cause
    return {
        "before": before.kind,
        "after": (after.kind, after.why, after.culprits),
        "tensor": (cause.tensors[0].name, cause.tensors[0].element, cause.tensors[0].bit),
        "again": again.kind,
        "raised": raised,
    }


def compare_sets(_: None = None) -> dict[str, Any]:
    """Compare plain models of which rank 0's has one module more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2))
    if dist.get_rank() == 0:
        model.append(nn.Linear(2, 2))
    verdict = commlens.check_numbers(model, group=dist.group.WORLD)
    cause: Any = verdict.cause
    return {
        "departure": cause.departure,
        "culprits": verdict.culprits,
        "own": [(each.ranks, each.names) for each in cause.only_on],
    }


def leave_one_out(_: None = None) -> tuple[str, list[str]]:
    """Let rank 1 not come to a check. The job goes on."""
    model, _optimizer = trained()
    if dist.get_rank() == 1:
        dist.barrier()
        return "", []
    verdict = commlens.check_numbers(model, timeout_s=2.0)
    dist.barrier()
    return verdict.kind, verdict.missing_evidence


def give_nonsense(_: None = None) -> list[str]:
    """Call with what cannot be compared. Return the errors."""
    others = dist.new_group([1, 2])
    calls: list[Any] = [
        lambda: commlens.must_agree("layers.7.weight"),
        lambda: commlens.must_agree(torch.ones(0), name="nothing"),
        lambda: commlens.check_numbers(nn.Linear(2, 2)),
    ]
    if dist.get_rank() == 0:
        calls.append(lambda: commlens.must_agree(torch.ones(2), group=others))
    errors = []
    for call in calls:
        try:
            call()
        except CommandError as error:
            errors.append(str(error))
    return errors


def compare_values(_: None = None) -> list[str]:
    """Say what must agree and differ, in a group without rank 0. Return what was logged."""
    from commlens.numbers import checks

    lines = listen().lines
    rank = dist.get_rank()
    others = dist.new_group([1, 2])
    if rank in (1, 2):
        commlens.must_agree(torch.tensor([1.0, float(rank)]), group=others, name="loss")
        commlens.must_agree(3, group=others, name="epoch")
    commlens.must_differ(rank, name="own")
    commlens.must_differ(rank // 2, name="batch")
    checks.finish()
    dist.barrier()
    return lines


def draw_on_one_rank(_: None = None) -> list[str]:
    """Train tensor parallel ranks with dropout and one seed. The last one draws a number more in
    the fifth step. Return what was logged.
    """
    from commlens.model.number_checks import NumberChecks
    from commlens.numbers import checks, sampling

    lines = listen().lines
    sampling.start(NumberChecks(every=1))
    torch.manual_seed(0)
    size = dist.get_world_size()
    model = nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Linear(6, 6))
    plan = {"2": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 6):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        if step == 5 and dist.get_rank() == size - 1:
            torch.rand(1)
        optimizer.step()
    checks.finish()
    return lines


def find_tensor_parallel_ranks(_: None = None) -> dict[str, tuple[int, ...]]:
    """Return the tensor parallel ranks of this one in several models."""
    from commlens.numbers.replicas import tensor_parallel_ranks

    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    both = parallelize_module(model(), square["tp"], plan)
    return {
        "alone": tensor_parallel_ranks(parallelize_module(model(), line, plan)),
        "in FSDP2": tensor_parallel_ranks(fully_shard(both, mesh=square["dp"])),
        "FSDP2": tensor_parallel_ranks(fully_shard(model(), mesh=line)),
        "HSDP": tensor_parallel_ranks(fully_shard(model(), mesh=square)),
    }
