"""Attention of DTensors on the CPU, which stands for the GPU in a fake world.

DTensor knows how to shard the attention of CUDA, but not the op that the CPU has in its place.
Tried on torch 2.13.0.
"""

from __future__ import annotations

from typing import Any

import torch

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def install() -> None:
    """Teach DTensor to shard it as it shards that of CUDA: by batch or by heads, if at all."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    ways = (Replicate(), Shard(0), Shard(1))
    known: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    if _FORWARD in known:
        return

    def forward(
        query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **others: Any
    ) -> Any:
        mask = [Replicate()] if others.get("attn_mask") is not None else []
        return [([way] * 2, [way] * 3 + mask) for way in ways]

    def backward(*args: Any, **others: Any) -> Any:
        mask = [Replicate()] if others.get("attn_mask") is not None else []
        return [([way] * 3, [way] * 6 + mask) for way in ways]

    register_sharding(_FORWARD)(forward)
    register_sharding(_BACKWARD)(backward)
