"""The rank's place in the job, as launchers describe it in environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from commlens import launchers
from commlens.tap.hand_made import innermost_store

_WITHOUT_PROCESSES = frozenset({"fake", "threaded"})


def local_rank() -> int:
    """Return the rank within this node; -1 if it is not known."""
    return launchers.number(os.environ, launchers.LOCAL_RANK)


class PlaceInJob(NamedTuple):
    """A process's place in its job, as ``init_process_group`` will find it."""

    rank: int  # -1 if not known yet
    world_size: int  # 0 if not known yet
    meeting: str  # where the ranks meet: "tcp://node1:29500", "file:///tmp/x"; empty if not known
    backend: str = ""

    @property
    def is_pretended(self) -> bool:
        """Whether the ranks are no processes: the fake backend has only this one, and PyTorch's
        tests have threads of one process.
        """
        return self.backend.lower() in _WITHOUT_PROCESSES


def place_of(given: Mapping[str, Any] = MappingProxyType({})) -> PlaceInJob:
    """Return the place from the arguments of ``init_process_group``, by name."""
    rank, world_size, store = given.get("rank"), given.get("world_size"), given.get("store")
    meeting = str(given.get("init_method") or "")
    if store is not None:
        meeting = _meeting_at(store)
    elif meeting in ("", "env://"):
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        meeting = f"tcp://{host}:{port}" if host and port else ""
    return PlaceInJob(
        rank if isinstance(rank, int) and rank >= 0 else launchers.number(os.environ, ["RANK"]),
        (
            world_size
            if isinstance(world_size, int) and world_size >= 0
            else launchers.number(os.environ, ["WORLD_SIZE"], 0)
        ),
        meeting,
        str(given.get("backend") or ""),
    )


def _meeting_at(store: Any) -> str:
    """Return the address or the file of a store; empty if it has neither."""
    store = innermost_store(store)
    host, port, path = (getattr(store, name, "") for name in ("host", "port", "path"))
    return f"tcp://{host}:{port}" if host and port else f"file://{path}" if path else ""


def ranks_of_this_node(rank: int) -> range:
    """Return the ranks of this node, or all ranks if the environment does not say."""
    import torch.distributed as dist

    return launchers.ranks_of_node(os.environ, rank) or range(dist.get_world_size())


def default_timeout_ms() -> int:
    """Return the timeout of the default process group in ms; 0 if torch does not say."""
    try:
        import torch.distributed.distributed_c10d as c10d

        group = c10d._get_default_group()
        device = group._device_types[0]
        return int(group._get_backend(device).options._timeout.total_seconds() * 1000)
    except Exception:
        return 0
