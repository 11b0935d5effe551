"""The hardware of the job's nodes, with the ranks that run there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from commlens.model.health import NodeHealth, RankPlace, gpus_by_index
from commlens.model.ranklog import RankLog
from commlens.model.topology import rail_of


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
    nodes = []
    for log in logs.values():
        if log.health is not None:
            places = {place.rank: place for place in log.health.ranks if place.rank in logs} or {
                log.rank: RankPlace(log.rank, log.pid)
            }
            nodes.append(Node(log.health, places))
    hosts = {log.host for log in logs.values()}
    for health in more:
        if health.ranks:
            nodes.append(
                Node(health, {place.rank: place for place in health.ranks if place.rank in logs})
            )
            continue
        gpus = gpus_by_index(health.values)
        nics = {
            gpu: str(found.get("nic", "")) for gpu, found in health.values.get("gpu", {}).items()
        }
        alone = not health.host and len(hosts) <= 1
        nodes.append(
            Node(
                health,
                {
                    rank: _place(log, gpus.get(log.local_rank, ""), nics)
                    for rank, log in logs.items()
                    if alone or log.host.partition(".")[0] == health.host.partition(".")[0]
                },
            )
        )
    return [node for node in nodes if node.places]


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
