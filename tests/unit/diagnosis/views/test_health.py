"""A node's hardware as a table."""

from __future__ import annotations

from pathlib import Path

from node_files import NodeFiles, gpu_address

from commlens.diagnosis.views.health import health_table
from commlens.health.monitor import look_once
from commlens.model.health import NodeHealth, NotRead


def test_the_parts_of_a_node_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, gpus=1)
    files.gpu(0, pcie_link_width_current="8", clocks_event_reasons_active="0x0000000000000040")
    files.port("mlx5_0", state="1: DOWN", symbol_error="12")
    files.log("NVRM: Xid (PCI:0000:10:00): 79, pid=7, name=python, bus", 1_790_251_391 * 10**9)
    table = health_table(look_once(tmp_path))
    rows = dict(table.rows)
    gpu = rows[f"GPU {gpu_address(0)} NVIDIA H100 80GB HBM3"]
    assert gpu == "41 °C, its clock is lowered because of heat or power, 8 PCIe lanes"
    assert rows["mlx5_0"] == "down, 400 Gbit/s, symbol errors: 12"
    assert rows["mlx5_1"] == "active, 400 Gbit/s" and rows["eth0"] == "up, 100 Gbit/s"
    assert rows["memory"] == "819 kB free, of 1.0 MB"
    (event,) = table.events
    assert event.startswith(f"2026-09-24 12:03:11 UTC: GPU {gpu_address(0)} reported Xid 79")
    assert table.not_read == []


def test_a_processor_whose_clock_was_never_lowered_has_no_row() -> None:
    def rows(times: float) -> list[tuple[str, str]]:
        values = {"host": {"cpu": {"throttled_times": times}}}
        return health_table(NodeHealth("n03", values=values)).rows

    assert rows(0.0) == []
    assert rows(1.0) == [("cpu", "its clock was lowered 1 time")]


def test_what_cannot_be_read_is_named() -> None:
    table = health_table(NodeHealth("n03", not_read=[NotRead("kernel log", "no right")]))
    assert table == ([], [], ["Kernel log: no right."])
