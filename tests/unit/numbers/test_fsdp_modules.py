"""The order in which FSDP2's modules run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from old_torch import fsdp2_on_a_cpu
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from commlens.numbers.fsdp_modules import FsdpModules
from commlens.numbers.replicas import Model

pytestmark = pytest.mark.usefixtures("two_ranks")


def sharded() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for module in model:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def names(modules: FsdpModules) -> list[str]:
    return [named.name for named in modules.take()]


@fsdp2_on_a_cpu
def test_modules_are_listed_in_the_order_in_which_they_first_run() -> None:
    model = sharded()
    modules = FsdpModules(Model([model]))
    model(torch.ones(1, 4))
    model[1](torch.ones(1, 4))
    assert names(modules) == ["the model", "0", "1"]
    model[1](torch.ones(1, 4))
    model[0](torch.ones(1, 4))
    assert names(modules) == ["1", "0"]


@fsdp2_on_a_cpu
def test_all_ranks_of_the_mesh_must_run_them_alike() -> None:
    model = sharded()
    modules = FsdpModules(Model([model]))
    model(torch.ones(1, 4))
    assert {each.kept_by for each in modules.take()} == {(((0, 1), "equal"),)}


def test_a_model_without_fsdp_is_left_alone() -> None:
    assert not names(FsdpModules(Model([nn.Linear(4, 4)])))
