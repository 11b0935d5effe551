"""Activation checkpointing of every kind, around tensor-parallel blocks: their collectives run
again inside backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from . import SMALL, Program, World, family, training_step
from .models import MLP, WIDTH, Stack
from .tensor_parallel import parallel_mlp, tensor_mesh


class CheckpointedStack(Stack):
    """A stack whose every layer is checkpointed by ``around``."""

    def __init__(self, around: Callable[..., torch.Tensor]) -> None:
        super().__init__(2)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.around(layer, x)
        return x


def build(world: World, around: Callable[..., torch.Tensor]) -> Program:
    model = CheckpointedStack(around)
    mesh = tensor_mesh(world)
    for layer in model.layers:
        parallel_mlp(layer, mesh)
    return Program([model], training_step(model, torch.randn(4, WIDTH, requires_grad=True)))


def save_matrix_products(
    context: object, op: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    matrix_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if matrix_product else CheckpointPolicy.PREFER_RECOMPUTE


@family(SMALL)
def checkpoint_reentrant(world: World) -> Program:
    return build(world, functools.partial(checkpoint, use_reentrant=True))


@family()
def checkpoint_non_reentrant(world: World) -> Program:
    return build(world, functools.partial(checkpoint, use_reentrant=False))


@family()
def checkpoint_selective(world: World) -> Program:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_matrix_products)
    return build(world, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


@family()
def checkpoint_wrapped(world: World) -> Program:
    """By wrapper modules, as trainers do it."""
    model, mesh = Stack(2), tensor_mesh(world)
    for layer in model.layers:
        parallel_mlp(layer, mesh)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, MLP)
    )
    return Program([model], training_step(model, torch.randn(4, WIDTH)))
