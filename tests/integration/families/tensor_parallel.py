"""Tensor and sequence parallelism by DTensor, and the modes in which they communicate differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from . import LARGE, Program, World, family, training_step
from .models import MLP, TOKENS, VOCABULARY, WIDTH, Stack, Transformer


def tensor_mesh(world: World) -> DeviceMesh:
    """One dimension of at most 8 ranks, the heads of the transformer; the rest of the world are
    replicas.
    """
    size = min(world.size, 8)
    return init_device_mesh("cpu", (world.size // size, size), mesh_dim_names=("dp", "tp"))["tp"]


def parallel_mlp(model: MLP, mesh: DeviceMesh) -> MLP:
    return parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def parallel_transformer(
    model: Transformer, mesh: DeviceMesh, output: ColwiseParallel | None = None
) -> Transformer:
    for layer in model.layers:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {
            "attention.wo": RowwiseParallel(),
            "feed_forward.net1": ColwiseParallel(),
            "feed_forward.net2": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    whole = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": output or ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, whole)


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, TOKENS))


@family(LARGE)
def tp_mlp(world: World) -> Program:
    model = parallel_mlp(MLP(), tensor_mesh(world))
    return Program([model], training_step(model, torch.randn(4, WIDTH)))


@family()
def tp_transformer(world: World) -> Program:
    model = parallel_transformer(Transformer(), tensor_mesh(world))
    return Program([model], training_step(model, tokens()))


@family()
def sequence_parallel(world: World) -> Program:
    mesh = tensor_mesh(world)
    model = Transformer()
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.net1": ColwiseParallel(),
            "feed_forward.net2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    whole = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    return Program([model], training_step(model, tokens()))


@family()
def loss_parallelism(world: World) -> Program:
    logits_stay = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = parallel_transformer(Transformer(), tensor_mesh(world), output=logits_stay)
    inputs, targets = tokens(), tokens().flatten()

    def step() -> Sequence[torch.Tensor]:
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets)
            loss.backward()
        return [loss.detach().to_local() if isinstance(loss, DTensor) else loss.detach()]

    return Program([model], step)


@family()
def without_gradients(world: World) -> Program:
    """no_grad and inference_mode: the same model, other collectives."""
    model = parallel_mlp(MLP(), tensor_mesh(world))
    x = torch.randn(4, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            first = model(x)
        with torch.inference_mode():
            second = model(x)
        return [first.clone(), second.clone()]

    return Program([model], step)


@family()
def redistributions(world: World) -> Program:
    """DTensors by hand: every pair of placements, and an op that needs its inputs elsewhere."""
    mesh = tensor_mesh(world)
    x = torch.randn(16, 16)

    def step() -> Sequence[torch.Tensor]:
        sharded = distribute_tensor(x, mesh, [Shard(0)])
        outs = [
            sharded.redistribute(mesh, [placement]).to_local()
            for placement in (Replicate(), Shard(1))
        ]
        implicit = sharded @ sharded
        return [*outs, implicit.to_local(), sharded.full_tensor(), sharded.sum().full_tensor()]

    return Program([], step)


@family()
def tp_stack_twice(world: World) -> Program:
    """Two models at once, each called twice before one backward."""
    mesh = tensor_mesh(world)
    models = [Stack(2), Stack(2)]
    for model in models:
        for layer in model.layers:
            parallel_mlp(layer, mesh)
    x = torch.randn(4, WIDTH)

    def step() -> Sequence[torch.Tensor]:
        loss = sum(model(model(x)).square().mean() for model in models)
        loss.backward()
        return [loss.detach()]

    return Program(models, step)
