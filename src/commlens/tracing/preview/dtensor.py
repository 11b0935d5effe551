"""DTensor in a fake world: its caches, which outlive the process groups that their entries name,
and attention on the CPU, which stands for the GPU. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from typing import Any

import torch

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def shard_attention() -> None:
    """Teach DTensor to shard the CPU's attention as it shards that of CUDA: by batch or by heads,
    if at all.
    """
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


def clear_caches() -> None:
    """Empty every cache of ``torch.distributed``, on all threads.

    Their keys compare meshes by value. A mesh of an earlier world that looks like the present one
    therefore finds its entry: a plan with groups that no longer exist.
    """
    for found in gc.get_objects():  # some are per thread and reachable by no name
        if type(found) is functools._lru_cache_wrapper and str(
            getattr(found, "__module__", "")
        ).startswith("torch.distributed"):
            found.cache_clear()
    redistribute: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    clear_plans = getattr(redistribute, "clear_redistribute_planner_cache", None)
    if clear_plans is not None:
        clear_plans()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        with contextlib.suppress(RuntimeError):  # this thread has none
            clear_native()
