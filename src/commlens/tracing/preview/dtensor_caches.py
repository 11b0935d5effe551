"""DTensor's caches, which outlive the process groups that their entries name.

Their keys compare meshes by value. A mesh of an earlier world that looks like the present one
therefore finds its entry: a plan with groups that no longer exist. Tried on torch 2.6.0, 2.13.0 and
2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from typing import Any

import torch


def clear() -> None:
    """Empty every cache of ``torch.distributed``, on all threads."""
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
