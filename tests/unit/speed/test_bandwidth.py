"""The bus bandwidth that transfers reach, of the nominal rate of their links."""

from __future__ import annotations

import pytest
from device_jobs import DeviceJob, Fault

from commlens.model.health import NodeHealth, RankPlace
from commlens.reports.step_table import rate_words, step_table
from commlens.speed.bandwidth import bus_rate, nominal_rate, reached_rates
from commlens.speed.device_times import TransferKind, timed_collectives
from commlens.speed.pace import timed_span
from commlens.speed.step_times import step_times


def node(host: str, ranks: list[int], **gpu: float) -> NodeHealth:
    """A node on which each rank has a GPU, and each two ranks share an adapter."""
    return NodeHealth(
        host,
        ranks=[RankPlace(rank, gpu=f"gpu{rank}", nic=f"mlx5_{rank // 2}") for rank in ranks],
        values={
            "gpu": {f"gpu{rank}": dict(gpu) for rank in ranks},
            "infiniband": {f"mlx5_{rank // 2}": {"rate_gbit": 400.0} for rank in ranks},
        },
    )


PCIE = {"nvlinks": 0.0, "pcie_generation_max": 4.0, "pcie_width_max": 16.0}
NVLINK = {**PCIE, "nvlinks": 18.0, "nvlink_mb_s": 26_562.0}


@pytest.mark.parametrize(
    ("op", "gb_s"),
    [("all_reduce", 6.0), ("all_gather", 12.0), ("reduce_scatter", 3.0), ("all_to_all", 0.0)],
)
def test_bandwidths_are_those_of_nccl_tests(op: str, gb_s: float) -> None:
    """Each of four ranks contributes 4 MB, in 1 ms."""
    assert bus_rate(TransferKind(op, 1_000_000, "float32", 4), 1e6) == gb_s * 1e9
    assert bus_rate(TransferKind("barrier", 0, "", 4), 1e6) == 0


def test_the_narrowest_known_links_of_a_group_count() -> None:
    fast, slow = node("a", [0, 1, 2, 3], **NVLINK), node("b", [4, 5], **PCIE)
    rates = [nominal_rate(ranks, [fast, slow]) for ranks in ([0, 1], [4, 5], [0, 1, 2, 3, 4, 5])]
    assert [(round(each.rate / 1e9), each.links) for each in rates if each is not None] == [
        (478, "18 NVLinks of 27 GB/s"),
        (32, "PCIe 4.0 x16"),
        (50, "one adapter of 400 Gbit/s a node"),
    ]
    assert nominal_rate([0, 6], [fast, slow]) is None, "the place of rank 6 is unknown"
    without = node("c", [0, 1], pcie_generation_max=4.0, pcie_width_max=16.0)
    assert nominal_rate([0, 1], [without]) is None, "it may have NVLink"


def test_the_rate_is_told_where_the_links_are_known() -> None:
    _, logs = [*DeviceJob(4, seed=1).looks(until_s=40.0)][-1]
    timed = timed_collectives(logs, timed_span(logs))
    assert reached_rates(timed, logs) == []
    assert step_table(step_times(logs)).rates == []
    logs[0].health = node("node", [0, 1, 2, 3], **PCIE)
    found = reached_rates(timed, logs)
    assert found
    words = rate_words(found[0])
    assert words.startswith("In group dp [0-3], all_reduce of 4.2 MB reaches ")
    assert words.endswith("% of the nominal 31.5 GB/s (PCIe 4.0 x16).")
    (bar,) = step_table(step_times(logs)).rates
    assert bar.text.startswith("In group dp [0-3], all_reduce of 4.2 MB reaches ")
    assert f" {bar.percent:.0f}% of the nominal " in bar.text
    _, logs = [*DeviceJob(4, seed=1, fault=Fault("device", 2, 1.4)).looks(until_s=20.0)][-1]
    assert "Rank 2 waits least" in step_table(step_times(logs)).answer, "on its device"
