"""Where a node is: inventories, Slurm's topology, NCCL's topology file, the tree of PCI devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from node_files import NodeFiles, gpu_address

from commlens.errors import CommandError
from commlens.health.monitor import Monitor, NodeSampler
from commlens.health.places import RankOfNode
from commlens.health.topology import (
    find_layout,
    hosts_in,
    leaf_of_slurm,
    nearest,
    read_inventory,
)
from commlens.model.topology import HostPlace

GPUS = [gpu_address(index) for index in range(2)]

DUMPED = f"""<system version="1">
  <cpu host_hash="0x1" numaid="0" arch="x86_64">
    <pci busid="0000:01:00.0" class="0x060400" link_width="16">
      <pci busid="{GPUS[0]}" class="0x030200"><gpu dev="0" sm="90" rank="0" gdr="1"/></pci>
      <pci busid="0000:80:00.0" class="0x020700"><nic><net name="mlx5_0" dev="0" port="1"/></nic></pci>
    </pci>
  </cpu>
  <cpu host_hash="0x1" numaid="1" arch="x86_64">
    <pci busid="0000:02:00.0" class="0x060400" link_width="16">
      <pci busid="{GPUS[1]}" class="0x030200"><gpu dev="1" sm="90" rank="1" gdr="1"/></pci>
      <pci busid="0000:81:00.0" class="0x020700"><nic><net name="mlx5_1" dev="1" port="1"/></nic></pci>
    </pci>
  </cpu>
</system>
"""

WITHOUT_NAMES = f"""<system version="1"><cpu numaid="0">
  <pci busid="ffff:ff:01.0" class="0x060400">
    <pci busid="{GPUS[0]}" class="0x030200"/><pci busid="0000:81:00.0" class="0x020700"/>
  </pci>
  <pci busid="ffff:ff:02.0" class="0x060400">
    <pci busid="{GPUS[1]}" class="0x030200"/><pci busid="0000:80:00.0" class="0x020700"/>
  </pci>
</cpu></system>
"""


def layout(root: Path, **environment: str):
    sampler = NodeSampler(root)
    values, _ = sampler.look(thorough=True)
    sampler.close()
    return find_layout(root, "n03", environment, values)


def test_the_topology_of_nccl_tells_the_adapter_of_each_gpu(tmp_path: Path):
    NodeFiles(tmp_path, gpus=2)
    (tmp_path / "topology.xml").write_text(DUMPED)
    (tmp_path / "named.xml").write_text(WITHOUT_NAMES)
    dumped = layout(tmp_path, NCCL_TOPO_DUMP_FILE=str(tmp_path / "topology.xml"))
    assert dumped.nic_of_gpu == {GPUS[0]: "mlx5_0", GPUS[1]: "mlx5_1"}
    assert [dumped.rail_of(gpu) for gpu in GPUS] == ["0", "1"]
    named = layout(tmp_path, NCCL_TOPO_FILE=str(tmp_path / "named.xml"))
    assert named.nic_of_gpu == {GPUS[0]: "mlx5_1", GPUS[1]: "mlx5_0"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "<system>",
        "no XML",
        "<a/>",
        *(f'<?xml version="1.0" encoding="{each}"?><a/>' for each in ("none", "gbk")),
    ],
)
def test_a_damaged_file_of_nccl_tells_nothing(tmp_path: Path, content: str):
    NodeFiles(tmp_path, gpus=2)
    (tmp_path / "topology.xml").write_text(content)
    found = layout(tmp_path, NCCL_TOPO_FILE=str(tmp_path / "topology.xml"))
    assert (found.nic_of_gpu, found.leaf) == ({}, "")


def test_the_tree_of_pci_devices_tells_it_without_any_file(tmp_path: Path):
    files = NodeFiles(tmp_path, gpus=2)
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for address, switch in (
        (GPUS[0], "0000:01:00.0"),
        (GPUS[1], "0000:02:00.0"),
        ("0000:80:00.0", "0000:02:00.0"),
        ("0000:81:00.0", "0000:01:00.0"),
    ):
        (devices / address).symlink_to(f"../../../devices/pci0000:00/{switch}/{address}")
    assert files.root == tmp_path
    assert layout(tmp_path).nic_of_gpu == {GPUS[0]: "mlx5_1", GPUS[1]: "mlx5_0"}


def test_an_adapter_is_named_only_where_it_is_the_only_one_near():
    gpus = {"g0": ("root", "s1", "g0"), "g1": ("root", "s1", "g1"), "g2": ("other", "g2")}
    two = {"mlx5_10": ("root", "s1", "a"), "mlx5_2": ("root", "s1", "b")}
    assert nearest(gpus, two) == {"g0": "mlx5_2", "g1": "mlx5_10"}, "one each, in their order"
    assert nearest({"g0": gpus["g0"]}, two) == {}
    assert nearest(gpus, {"mlx5_0": ("root", "s1", "a")}) == {"g0": "mlx5_0", "g1": "mlx5_0"}


@pytest.mark.parametrize(
    ("address", "pattern", "leaf"),
    [
        ("spine1.leaf7.n03", "switch.switch.node", "leaf7"),
        ("block2.n03", "block.node", "block2"),
        ("n03", "node", ""),
        ("", "", ""),
        ("leaf7.n03", "switch.switch.node", ""),
    ],
)
def test_slurm_names_the_switch_to_the_ranks(address: str, pattern: str, leaf: str):
    environment = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert leaf_of_slurm(environment) == leaf


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("", []),
        ("n[x]", []),
    ],
)
def test_lists_of_hosts(names: str, hosts: list[str]):
    assert hosts_in(names) == hosts


def test_a_list_of_hosts_ends_somewhere():
    assert len(hosts_in("n[0-99999999]m[0-99999999]")) == 200_000


def test_an_inventory_in_yaml_and_in_json(tmp_path: Path):
    yaml, other = tmp_path / "topology.yaml", tmp_path / "topology.json"
    yaml.write_text(
        "hosts:\n  n[01-02]: {leaf: leaf-1, rack: r1}\n  n03.cluster: {leaf: leaf-2}\n"
        "rails: [mlx5_0, mlx5_1]\npattern: '(?P<rack>r\\d+)$'\n"
    )
    other.write_text(json.dumps({"hosts": {"n[01-02]": {"leaf": "leaf-1", "rack": "r1"}}}))
    found = read_inventory(yaml)
    assert found.of("n02.cluster") == HostPlace("leaf-1", "r1", ["mlx5_0", "mlx5_1"])
    assert found.of("n03").leaf == "leaf-2"
    assert read_inventory(other).of("n01") == HostPlace("leaf-1", "r1")


def test_slurms_topology(tmp_path: Path):
    path = tmp_path / "topology.txt"
    path.write_text(
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[01-02]\n"
        "# SwitchName=old Nodes=n01\n"
        "SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[03-04]\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[01-04] Switches=leaf[1-2]\n"
    )
    found = read_inventory(path)
    assert [found.of(f"n0{number}").leaf for number in (1, 2, 3, 4, 5)] == [
        "leaf1",
        "leaf1",
        "leaf2",
        "leaf2",
        "",
    ]


@pytest.mark.parametrize(
    "content", ["hosts: [1, 2", "hosts: 5", "racks: {}", "pattern: '('", "hosts: {n1: {leef: a}}"]
)
def test_an_inventory_that_cannot_be_understood(tmp_path: Path, content: str):
    path = tmp_path / "topology.yaml"
    path.write_text(content)
    with pytest.raises(CommandError, match=r"topology\.yaml cannot be understood: "):
        read_inventory(path)


def test_an_inventory_that_is_not_there(tmp_path: Path):
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        read_inventory(tmp_path / "topology.yaml")


def test_the_watcher_tells_the_places_of_its_ranks(tmp_path: Path):
    NodeFiles(tmp_path, gpus=2)
    path = tmp_path / "topology.yaml"
    path.write_text("hosts: {n03: {leaf: leaf-1, rack: r2}}\nrails: [mlx5_1, mlx5_0]\n")
    monitor = Monitor(tmp_path, "n03", topology=path)
    try:
        monitor.learn_places({})
        monitor.look_now()
        health = monitor.report([RankOfNode(6, 77, 0, {}), RankOfNode(7, 78, 1, {})], wait_s=20)
    finally:
        monitor.close()
    assert (health.leaf, health.rack) == ("leaf-1", "r2")
    assert [(place.gpu_index, place.nic, place.rail) for place in health.ranks] == [
        (0, "mlx5_1", "1"),
        (1, "mlx5_0", "0"),
    ]


def test_an_inventory_that_the_watcher_cannot_read_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    NodeFiles(tmp_path, gpus=1)
    monitor = Monitor(tmp_path, "n03", topology=tmp_path / "none.yaml")
    try:
        monitor.learn_places({"SLURM_TOPOLOGY_ADDR": "leaf7.n03"})
        monitor.look_now()
        health = monitor.report([], wait_s=20)
    finally:
        monitor.close()
    assert "infiniband" in health.values and health.leaf == ""
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"commlens: The topology {tmp_path / 'none.yaml'} cannot be read: No such file or directory."
    ]
