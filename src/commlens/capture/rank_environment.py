"""The rank's place in the job, as launchers describe it in environment variables."""

from __future__ import annotations

import contextlib
import os
from typing import Any

_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID")


def number(*names: str) -> int:
    """Return the first of these variables that holds an integer; -1 if none does."""
    for name in names:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[name])
    return -1


def local_rank() -> int:
    """Return the rank within this node; -1 if it is not known."""
    return number(*_LOCAL_RANK_VARIABLES)


def rank_and_world(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return rank and world size as ``init_process_group(backend, init_method, timeout, world_size, rank, ...)`` will find them."""
    world_size = kwargs.get("world_size", args[3] if len(args) > 3 else -1)
    rank = kwargs.get("rank", args[4] if len(args) > 4 else -1)
    if not isinstance(rank, int) or rank < 0:
        rank = number("RANK")
    if not isinstance(world_size, int) or world_size < 0:
        world_size = max(number("WORLD_SIZE"), 0)
    return rank, world_size


def ranks_of_this_node(rank: int) -> range:
    """Return the ranks of this node, or all ranks if the environment does not say."""
    import torch.distributed as dist

    local, size = local_rank(), number("LOCAL_WORLD_SIZE")
    return range(rank - local, rank - local + size) if local >= 0 and size > 0 else range(dist.get_world_size())
