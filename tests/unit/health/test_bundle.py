"""Support bundles: folders with the files of nodes."""

from __future__ import annotations

from pathlib import Path

from node_files import NodeFiles

from commlens.health.bundle import inventory_file, read_bundle
from commlens.health.topology import read_inventory


def test_each_host_has_a_folder(tmp_path: Path) -> None:
    for name in ("n03", "n01"):
        NodeFiles(tmp_path / name).log("nfs: server a OK", 10**18)
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("")
    found = read_bundle(tmp_path)
    assert [(node.host, len(node.events)) for node in found] == [("n01", 1), ("n03", 1)]


def test_a_folder_of_one_host(tmp_path: Path) -> None:
    NodeFiles(tmp_path)
    (node,) = read_bundle(tmp_path)
    assert node.host == "" and "infiniband" in node.values


def test_an_inventory_beside_the_hosts(tmp_path: Path) -> None:
    NodeFiles(tmp_path / "n03")
    assert inventory_file(tmp_path) is None
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=leaf2 Nodes=n[01-04]\n")
    assert inventory_file(tmp_path) == file
    (node,) = read_bundle(tmp_path, read_inventory(file))
    assert (node.host, node.leaf) == ("n03", "leaf2")
