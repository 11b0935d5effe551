"""Hands over the inputs of each data-parallel model (in DDP, FSDP1 or FSDP2) before its forward
pass, with the ranks that must each read inputs of their own.

torch's private names: FSDP1's ``_inter_node_pg``; FSDP2's ``FSDPState``, its ``_root_pre_forward``,
and ``_state_ctx`` (tried with torch 2.13). A module without these names is not watched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commlens.numbers.replicas import fsdp2_groups, group_ranks, mesh_ranks
from commlens.tap.groups import memberships

log = logging.getLogger("commlens")

Ranks = tuple[int, ...]
Note = Callable[[Any, Callable[[], Ranks], Any], None]
"""Gets a module, a function that returns the ranks with inputs of their own (none: they may share
some), and this rank's inputs.
"""


def watch(note: Note) -> None:
    """Call ``note`` before each forward pass of a data-parallel module."""
    _wrap_forward(DistributedDataParallel, note, lambda module: group_ranks(module.process_group))
    try:
        from torch.distributed.fsdp import FullyShardedDataParallel

        # the ranks that share a module's shards; with HYBRID_SHARD, those of one replica
        _wrap_forward(
            FullyShardedDataParallel,
            note,
            lambda module: _unless_divided(group_ranks(module.process_group)),
        )
        _wrap_fsdp2(note)
    except (ImportError, AttributeError) as error:
        log.debug("commlens: the inputs of FSDP are not compared: %s", error)


def _wrap_forward(kind: Any, note: Note, ranks_of: Callable[[Any], Ranks]) -> None:
    original = kind.forward

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            note(self, lambda: ranks_of(self), (inputs, kwargs))
        return original(self, *inputs, **kwargs)

    kind.forward = forward


def _wrap_fsdp2(note: Note) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    original = FSDPState._root_pre_forward

    @functools.wraps(original)
    def _root_pre_forward(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        result = original(self, module, args, kwargs)
        if not torch.compiler.is_compiling():
            note(module, lambda: _ranks_of_fsdp2(self), (args, kwargs))
        return result

    FSDPState._root_pre_forward = _root_pre_forward


def _ranks_of_fsdp2(state: Any) -> Ranks:
    """Return the ranks of the largest mesh over which a model is sharded and replicated."""
    meshes = [
        group.mesh_info.mesh
        for module_state in state._state_ctx.all_states
        for group in fsdp2_groups(module_state)
        if not getattr(group.mesh_info, "is_spmd_mesh", False)
    ]
    if not meshes:
        return ()
    mesh = max(meshes, key=lambda mesh: int(mesh.size()))
    of_dims = [group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    return _unless_divided(mesh_ranks(mesh), of_dims)


def _unless_divided(ranks: Ranks, groups_of_fsdp: Iterable[Ranks] = ()) -> Ranks:
    """Return the ranks; none if the program has made a group of some of them: these may share a
    batch on purpose, as ranks that split a sequence do.
    """
    of_program = set(memberships()) - {ranks, *groups_of_fsdp}
    divided = any(len(group) > 1 and set(group) < set(ranks) for group in of_program)
    return () if divided else ranks


def is_training(module: Any) -> bool:
    """Return whether a forward pass of a module belongs to training."""
    return bool(module.training) and torch.is_grad_enabled() and dist.is_initialized()
