"""InfiniBand ports, network interfaces and TCP, read from a folder."""

from __future__ import annotations

from pathlib import Path

from node_files import NodeFiles

from commlens.health.network import read_infiniband, read_interfaces, read_tcp


def test_an_infiniband_port(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    files.port("mlx5_1", symbol_error="12")
    files.write("sys/class/infiniband/mlx5_1/ports/1/hw_counters/packet_seq_err", "3\n")
    port = read_infiniband(tmp_path)["mlx5_1"]
    assert (port["state"], port["physical"], port["rate_gbit"]) == ("ACTIVE", "LinkUp", 400.0)
    assert (port["symbol_error"], port["packet_seq_err"]) == (12.0, 3.0)
    assert port["pci"] == "0000:81:00.0"


def test_a_second_port_has_its_number(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    files.write("sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN\n")
    assert read_infiniband(tmp_path)["mlx5_0/2"]["state"] == "DOWN"


def test_an_interface_and_none_of_a_container(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    files.interface("eth0", rx_errors="7")
    for virtual in ("lo", "veth12", "docker0"):
        files.write(f"sys/class/net/{virtual}/operstate", "up\n")
    found = read_interfaces(tmp_path)
    assert list(found) == ["eth0"]
    eth0 = found["eth0"]
    assert (eth0["state"], eth0["speed"], eth0["rx_errors"]) == ("up", 100_000.0, 7.0)


def test_tcp(tmp_path: Path) -> None:
    NodeFiles(tmp_path).retransmits(321)
    assert read_tcp(tmp_path) == {"tcp": {"retransmits": 321.0, "segments": 100_000.0}}


def test_nothing_is_there(tmp_path: Path) -> None:
    assert read_infiniband(tmp_path) == read_interfaces(tmp_path) == read_tcp(tmp_path) == {}
