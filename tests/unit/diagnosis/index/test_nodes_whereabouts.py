"""Where ranks run."""

from __future__ import annotations

from commlens.diagnosis.index.nodes import Whereabouts, nodes_of, whereabouts
from commlens.model.health import NodeHealth, RankPlace
from commlens.model.ranklog import RankLog
from commlens.model.topology import HostPlace, Inventory


def test_a_node_tells_it_of_its_ranks():
    place = RankPlace(1, 11, "0000:10:00.0", gpu_index=3, nic="mlx5_3", rail="3")
    health = NodeHealth("n0", ranks=[place], leaf="leaf-1", rack="r2")
    logs = {1: RankLog(1, 2, host="n0", pid=11, health=health)}
    assert whereabouts(logs, nodes_of(logs)) == {
        1: Whereabouts("n0", "leaf-1", "r2", "3", "3", "mlx5_3")
    }


def test_an_inventory_tells_it_of_the_others():
    inventory = Inventory({"n0": HostPlace("leaf-1")}, rails=["mlx5_0", "mlx5_1"])
    logs = {
        0: RankLog(0, 3, host="n0.cluster", local_rank=1),
        1: RankLog(1, 3, host="n1", local_rank=5),
        2: RankLog(2, 3),
    }
    assert whereabouts(logs, [], inventory) == {
        0: Whereabouts("n0.cluster", "leaf-1", "", "1", "", "mlx5_1"),
        1: Whereabouts("n1"),
        2: Whereabouts(),
    }
