"""Which ranks run on the nodes that told of their hardware."""

from __future__ import annotations

from commlens.diagnosis.index.nodes import nodes_of
from commlens.model.health import NodeHealth, RankPlace, Values
from commlens.model.ranklog import RankLog


def logs(*hosts: str) -> dict[int, RankLog]:
    return {
        rank: RankLog(rank, len(hosts), host=host, pid=100 + rank, local_rank=rank % 2)
        for rank, host in enumerate(hosts)
    }


GPUS: dict[str, Values] = {
    "gpu": {
        "0000:10:00.0": {"index": 0.0, "nic": "mlx5_1"},
        "0000:11:00.0": {"index": 1.0, "nic": "mlx5_0"},
    }
}


def test_a_log_carries_what_its_node_told() -> None:
    job = logs("n0", "n0", "n1", "n1")
    job[2].health = NodeHealth("n1", ranks=[RankPlace(2, 102, "a"), RankPlace(3), RankPlace(9)])
    (node,) = nodes_of(job)
    assert sorted(node.places) == [2, 3] and node.places[2].gpu == "a"
    assert not node.gpus_known


def test_what_was_collected_apart_is_joined_by_the_names_of_hosts() -> None:
    job = logs("n0.cluster", "n0.cluster", "n1.cluster", "n1.cluster")
    nodes = nodes_of(job, [NodeHealth("n1", values=GPUS), NodeHealth("n9", values=GPUS)])
    (node,) = nodes
    assert node.places == {
        2: RankPlace(2, 102, "0000:10:00.0", gpu_index=0, nic="mlx5_1", rail="1"),
        3: RankPlace(3, 103, "0000:11:00.0", gpu_index=1, nic="mlx5_0", rail="0"),
    }
    assert node.gpus_known


def test_a_folder_without_a_host_is_of_the_only_one() -> None:
    assert sorted(nodes_of(logs("n0", "n0"), [NodeHealth("")])[0].places) == [0, 1]
    assert nodes_of(logs("n0", "n1"), [NodeHealth("")]) == []
