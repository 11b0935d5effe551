"""Which parts of a node the ranks of a job use: their GPUs, and the interfaces of the network."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from commlens.health.changes import WORKING, Sources
from commlens.model.health import RankPlace, gpus_by_index

VISIBLE_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
ADAPTER_CHOICES: Final = {
    "infiniband": ("NCCL_IB_HCA",),
    "network": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
}
"""By source: the variables that choose among its parts."""


class RankOfNode(NamedTuple):
    """A rank's process."""

    rank: int
    pid: int
    local_rank: int | None
    environment: Mapping[str, str]
    swapped_bytes: float = 0.0  # of its memory, in swap space


def place_ranks(
    processes: Iterable[RankOfNode], sources: Sources, gpu_of_pid: Mapping[int, str]
) -> list[RankPlace]:
    """Return the GPU of each rank.

    The driver lists the processes on a GPU by pid. In a container these are the host's; then a
    rank's GPU is assumed to be the one of its local rank among those that are visible to it.
    """
    by_index = gpus_by_index(sources)
    places = []
    for process in processes:
        seen = gpu_of_pid.get(process.pid, "")
        gpu = seen or by_index.get(_index(process, len(by_index)), "")
        index = next((index for index, address in by_index.items() if address == gpu), None)
        places.append(
            RankPlace(
                process.rank,
                process.pid,
                gpu,
                bool(seen),
                gpu_index=index if gpu and index is not None else -1,
                swapped_bytes=process.swapped_bytes,
            )
        )
    return places


def _index(process: RankOfNode, gpus: int) -> int:
    """Return the index of a rank's GPU by its local rank and its environment; -1 if unknown."""
    if process.local_rank is None:
        return -1
    visible = next(
        (process.environment[name] for name in VISIBLE_DEVICES if name in process.environment), None
    )
    if visible is None:
        return process.local_rank
    indices = [part.strip() for part in visible.split(",")]
    chosen = indices[0 if len(indices) == 1 else process.local_rank % len(indices)]
    return int(chosen) if chosen.isdecimal() and int(chosen) < gpus else -1


def networks(
    environment: Mapping[str, str], sources: Sources, went_down: Collection[str] = ()
) -> list[str]:
    """Return the interfaces that the job uses: of the adapters that were up, those that its
    environment chooses, or all.

    Args:
        environment: of a rank.
        sources: the values of the first look.
        went_down: interfaces that were up before that look, also those that it does not list.
    """
    chosen: list[str] = []
    unlisted = set(went_down)
    for source, variables in ADAPTER_CHOICES.items():
        patterns = [environment[name] for name in variables if environment.get(name, "").strip()]
        parts = sources.get(source, {})
        unlisted -= parts.keys()
        chosen += [
            part
            for part, values in parts.items()
            if (values.get("state") == WORKING[source] or part in went_down)
            and (not patterns or any(_is_named(part, each.strip()) for each in patterns))
        ]
    return [*chosen, *sorted(unlisted)]


def _is_named(part: str, pattern: str) -> bool:
    """Return whether one of NCCL's lists names an interface: ``mlx5_0:1,mlx5_2``, ``=eth0``,
    ``^docker``, ``eth`` (a prefix).
    """
    excludes = pattern.startswith("^")
    exact = pattern.lstrip("^").startswith("=")
    names = [each.partition(":")[0] for each in pattern.lstrip("^=").split(",")]
    device = part.partition("/")[0]
    named = any(device == name if exact else device.startswith(name) for name in names if name)
    return named != excludes


def part_names(sources: Sources) -> dict[str, str]:
    """Return the interface behind each PCI address: the InfiniBand device, else the network's."""
    names: dict[str, str] = {}
    for source in ("network", "infiniband"):
        for part, values in sources.get(source, {}).items():
            address = values.get("pci")
            if isinstance(address, str) and address:
                names[address] = part
    return names


def aliases(sources: Sources) -> dict[str, str]:
    """Return the InfiniBand device behind each network interface of the same adapter."""
    of_address = part_names(sources)
    return {
        part: of_address[address]
        for part, values in sources.get("network", {}).items()
        if isinstance(address := values.get("pci"), str) and address in of_address
    }
