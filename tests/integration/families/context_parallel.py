"""Sequences split over ranks: torch's context parallelism, and a ring by point-to-point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import Program, World, family, training_step


class RingAttention(torch.autograd.Function):
    """torch's own ring: keys and values go round, a rank's share at a time. Its entry point knows
    CUDA's attention only.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = ring._templated_ring_attention(
            dist.group.WORLD, 2, attend, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return ring._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            attend,
            gradient,
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
            dropout_p=0.0,
        )


class RingSelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.contiguous() for part in self.qkv(x).chunk(3, dim=-1))
        return RingAttention.apply(q, k, v)


@family(needs=(2, 13))
def ring_attention(world: World) -> Program:
    model = RingSelfAttention()
    return Program([model], training_step(model, torch.randn(1, 2, 8, 8)))


class Rotate(torch.autograd.Function):
    """Pass a tensor to the next rank; its gradient goes back to the one before."""

    @staticmethod
    def exchange(x: torch.Tensor, to: int, source: int) -> torch.Tensor:
        out = torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x.contiguous(), to), dist.P2POp(dist.irecv, out, source)]
        )
        for work in works:
            work.wait()
        return out

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, to: int, source: int
    ) -> torch.Tensor:
        ctx.ends = (to, source)
        return Rotate.exchange(x, to, source)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        to, source = ctx.ends
        return Rotate.exchange(gradient, source, to), None, None


class RingMixer(torch.nn.Module):
    """Adds up what every rank holds, seen through one's own weights."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.world = world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        to, source = (
            (self.world.rank + 1) % self.world.size,
            (self.world.rank - 1) % self.world.size,
        )
        total = self.project(x)
        for _ in range(self.world.size - 1):
            x = Rotate.apply(x, to, source)
            total = total + self.project(x)
        return total


@family()
def ring_by_hand(world: World) -> Program:
    model = RingMixer(world)
    x = torch.randn(4, 8)

    def step() -> Sequence[torch.Tensor]:
        out = model(x.clone().requires_grad_())
        out.square().sum().backward()
        # On the fake backend nothing arrives: what was received is not defined.
        return [out.detach()] if world.backend == "gloo" else []

    return Program([model] if world.backend == "gloo" else [], step)
