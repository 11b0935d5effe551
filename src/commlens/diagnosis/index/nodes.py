"""The hardware of the job's nodes with the ranks that run there, and where each rank runs: its
host, switch, rack, rail and GPU, as far as they are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from commlens.model.health import NodeHealth, RankPlace, gpus_by_index
from commlens.model.ranklog import RankLog
from commlens.model.topology import Inventory, rail_of


class Node(NamedTuple):
    """A node, and the ranks of the job that run there."""

    health: NodeHealth
    places: Mapping[int, RankPlace]  # by rank

    @property
    def gpus_known(self) -> bool:
        """Whether the GPU of each rank is known."""
        return all(place.gpu for place in self.places.values())


def nodes_of(logs: Mapping[int, RankLog], more: Iterable[NodeHealth] = ()) -> list[Node]:
    """Return the nodes whose hardware is known.

    Args:
        logs: by rank; some carry the health of their node.
        more: health that was collected apart. Where it names no ranks, they are found by the name
            of their host, and each has the GPU of its local rank.
    """
    nodes = [
        Node(log.health, _places_here(log.health, logs) or {log.rank: RankPlace(log.rank, log.pid)})
        for log in logs.values()
        if log.health is not None
    ]
    for health in more:
        places = _places_here(health, logs) if health.ranks else _places_by_host(health, logs)
        nodes.append(Node(health, places))
    return [node for node in nodes if node.places]


def _places_here(health: NodeHealth, logs: Mapping[int, RankLog]) -> dict[int, RankPlace]:
    return {place.rank: place for place in health.ranks if place.rank in logs}


def _places_by_host(health: NodeHealth, logs: Mapping[int, RankLog]) -> dict[int, RankPlace]:
    """Return the places of the ranks on a host that names none."""
    gpus = gpus_by_index(health.values)
    found = health.values.get("gpu", {}).items()
    nics = {gpu: str(values.get("nic", "")) for gpu, values in found}
    alone = not health.host and len({log.host for log in logs.values()}) <= 1
    return {
        rank: _place(log, gpus.get(log.local_rank, ""), nics)
        for rank, log in logs.items()
        if alone or log.host.partition(".")[0] == health.host.partition(".")[0]
    }


def _place(log: RankLog, gpu: str, nics: Mapping[str, str]) -> RankPlace:
    """Return the place of a rank with the GPU of its local rank."""
    nic = nics.get(gpu, "")
    index = log.local_rank if gpu and log.local_rank is not None else -1
    return RankPlace(
        log.rank,
        log.pid,
        gpu,
        gpu_index=index,
        nic=nic,
        rail=rail_of(nic, list(nics.values())),
    )


class Whereabouts(NamedTuple):
    """Where a rank runs; what is empty is not known."""

    host: str = ""
    leaf: str = ""
    rack: str = ""
    rail: str = ""
    gpu: str = ""  # the index of its GPU on the host
    nic: str = ""  # the adapter nearest to its GPU


def whereabouts(
    logs: Mapping[int, RankLog], nodes: Sequence[Node], inventory: Inventory | None = None
) -> dict[int, Whereabouts]:
    """Return where each rank runs.

    Args:
        logs: of the ranks.
        nodes: those that told of their hardware.
        inventory: where hosts are, for those that did not tell it.
    """
    of_rank = {rank: (node, place) for node in nodes for rank, place in node.places.items()}
    found = {}
    for rank in {*logs, *of_rank}:
        node, place = of_rank.get(rank, (None, RankPlace(rank)))
        found[rank] = _whereabouts_of(logs.get(rank), node, place, inventory or Inventory())
    return found


def _whereabouts_of(
    log: RankLog | None, node: Node | None, place: RankPlace, inventory: Inventory
) -> Whereabouts:
    health = node.health if node is not None else NodeHealth("")
    local_rank, host = None, health.host
    if log is not None:
        place = log.place if log.place is not None and not place.nic else place
        local_rank, host = log.local_rank, log.host or host
    told = inventory.of(host)
    nic, rail = place.nic, place.rail
    # an inventory with rails numbers GPUs by local rank
    index = place.gpu_index if place.gpu_index >= 0 or local_rank is None else local_rank
    if not nic and 0 <= index < len(told.rails):
        nic = told.rails[index]
        rail = rail_of(nic, told.rails)
    gpu = str(place.gpu_index) if place.gpu_index >= 0 else ""
    return Whereabouts(host, health.leaf or told.leaf, health.rack or told.rack, rail, gpu, nic)
