"""Where hosts are."""

from __future__ import annotations

import re

from commlens.model.topology import HostPlace, Inventory, rail_of


def test_a_host_is_found_by_its_short_name():
    inventory = Inventory({"n03": HostPlace("leaf-1", "r2")}, rails=["a", "b"])
    assert inventory.of("n03.cluster.example") == HostPlace("leaf-1", "r2", ["a", "b"])
    assert inventory.of("n04") == HostPlace(rails=["a", "b"])


def test_a_pattern_tells_what_the_inventory_does_not():
    inventory = Inventory({"r7-n03": HostPlace("leaf-1")}, re.compile(r"(?P<rack>r\d+)-n\d+"))
    assert inventory.of("r7-n03") == HostPlace("leaf-1", "r7")
    assert inventory.of("login") == HostPlace()


def test_a_rail_is_the_place_of_an_adapter_among_those_of_the_node():
    nics = ["mlx5_10", "mlx5_2", "mlx5_2", "", "mlx5_1"]
    assert [rail_of(nic, nics) for nic in ("mlx5_1", "mlx5_2", "mlx5_10", "eth0", "")] == [
        "0",
        "1",
        "2",
        "",
        "",
    ]
    assert rail_of("mlx5_0", ["mlx5_0", "mlx5_0"]) == "", "all GPUs share it"
