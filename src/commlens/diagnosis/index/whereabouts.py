"""Where each rank runs: its host, switch, rack, rail and GPU, as far as they are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commlens.diagnosis.index.node_health import Node
from commlens.model.health import RankPlace
from commlens.model.ranklog import RankLog
from commlens.model.topology import Inventory, rail_of


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
        log = logs.get(rank)
        node, place = of_rank.get(rank, (None, RankPlace(rank)))
        if log is not None and log.place is not None and not place.nic:
            place = log.place
        host = (log.host if log is not None else "") or (
            node.health.host if node is not None else ""
        )
        told = inventory.of(host) if inventory is not None else None
        nic, rail = place.nic, place.rail
        # an inventory with rails numbers GPUs by local rank
        index = place.gpu_index if place.gpu_index >= 0 or log is None else log.local_rank
        if not nic and told is not None and index is not None and 0 <= index < len(told.rails):
            nic = told.rails[index]
            rail = rail_of(nic, told.rails)
        found[rank] = Whereabouts(
            host,
            (node.health.leaf if node is not None else "") or (told.leaf if told else ""),
            (node.health.rack if node is not None else "") or (told.rack if told else ""),
            rail,
            str(place.gpu_index) if place.gpu_index >= 0 else "",
            nic,
        )
    return found
