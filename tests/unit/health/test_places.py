"""Which parts of a node the ranks use."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from commlens.health.places import RankOfNode, aliases, networks, part_names, place_ranks
from commlens.model.health import RankPlace, Values

GPUS: dict[str, Values] = {
    "gpu": {f"0000:0{index}:00.0": {"index": float(index)} for index in range(4)}
}
NETWORK: dict[str, Values] = {
    "infiniband": {
        "mlx5_0": {"state": "ACTIVE", "pci": "0000:80:00.0"},
        "mlx5_1": {"state": "ACTIVE", "pci": "0000:81:00.0"},
        "mlx5_10": {"state": "DOWN"},
    },
    "network": {
        "eth0": {"state": "up"},
        "ibp129s0": {"state": "up", "pci": "0000:81:00.0"},
    },
}


def placed(environment: Mapping[str, str], local_rank: int | None = 1) -> str:
    (place,) = place_ranks([RankOfNode(5, 77, local_rank, environment)], GPUS, {})
    return place.gpu


def test_the_driver_tells_the_gpu_of_a_process() -> None:
    process = RankOfNode(5, 77, 1, {})
    assert place_ranks([process], GPUS, {77: "0000:03:00.0"}) == [
        RankPlace(5, 77, "0000:03:00.0", gpu_seen=True, gpu_index=3)
    ]


@pytest.mark.parametrize(
    ("environment", "gpu"),
    [
        ({}, "0000:01:00.0"),
        ({"CUDA_VISIBLE_DEVICES": "3,2"}, "0000:02:00.0"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "0000:03:00.0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,GPU-1"}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "7,9"}, ""),
    ],
)
def test_else_its_local_rank_does(environment: Mapping[str, str], gpu: str) -> None:
    assert placed(environment) == gpu


def test_without_a_local_rank_the_gpu_is_unknown() -> None:
    assert placed({}, None) == ""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["mlx5_0", "mlx5_1", "eth0", "ibp129s0"]),
        ({"NCCL_IB_HCA": "mlx5_1:1"}, ["mlx5_1", "eth0", "ibp129s0"]),
        ({"NCCL_IB_HCA": "=mlx5_1", "NCCL_SOCKET_IFNAME": "eth"}, ["mlx5_1", "eth0"]),
        ({"NCCL_IB_HCA": "^mlx5_0", "GLOO_SOCKET_IFNAME": "eth0"}, ["mlx5_1", "eth0"]),
        ({"NCCL_IB_HCA": "mlx5_10", "NCCL_SOCKET_IFNAME": "lo"}, []),
    ],
)
def test_the_interfaces_that_a_job_uses(
    environment: Mapping[str, str], expected: list[str]
) -> None:
    assert networks(environment, NETWORK) == expected


def test_one_adapter_has_one_name() -> None:
    assert part_names(NETWORK)["0000:81:00.0"] == "mlx5_1"
    assert aliases(NETWORK) == {"ibp129s0": "mlx5_1"}
