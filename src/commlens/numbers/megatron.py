"""Which ranks hold copies of the parameters of a model that consists of Megatron's modules.

Megatron trains plain tensors. It marks those of which each tensor parallel rank has its own shard,
and keeps its groups in ``megatron.core.parallel_state``. Nothing of it is imported here. Tried with
megatron-core 0.16.1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

_STATE: Final = "megatron.core.parallel_state"

Ranks = tuple[int, ...]


def find_copies(
    root: nn.Module, ranks_of: Callable[[Any], Ranks]
) -> Mapping[int, tuple[Ranks, ...]]:
    """Return the groups of ranks that hold copies of each parameter, by the parameter's id; nothing
    if this is no model of Megatron, or it has groups of its own.

    Args:
        root: the model.
        ranks_of: returns the global ranks of a process group.
    """
    state = sys.modules.get(_STATE)
    if state is None or not _is_megatron(root) or not state.model_parallel_is_initialized():
        return {}
    tensor = ranks_of(state.get_tensor_model_parallel_group())
    data = ranks_of(state.get_data_parallel_group(with_context_parallel=True))
    experts = state.get_expert_data_parallel_group(check_initialized=False)
    of_experts = ranks_of(experts) if experts is not None else ()
    own = (getattr(module, "tp_group", None) for module in root.modules())
    if any(group is not None and ranks_of(group) != tensor for group in own):
        return {}
    found: dict[int, tuple[Ranks, ...]] = {}
    for parameter in root.parameters():
        if not getattr(parameter, "allreduce", True):
            groups = [of_experts]
        elif getattr(parameter, "tensor_model_parallel", False):
            groups = [data]
        else:
            groups = [data, tensor]
        found[id(parameter)] = tuple(ranks for ranks in groups if len(ranks) > 1)
    return found


def _is_megatron(root: nn.Module) -> bool:
    return any(type(module).__module__.startswith("megatron.core.") for module in root.modules())
