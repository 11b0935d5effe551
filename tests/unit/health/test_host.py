"""Memory, storage and processors, read from a folder."""

from __future__ import annotations

from pathlib import Path

from node_files import NodeFiles

from commlens.health.host import read_host


def test_memory_storage_and_heat(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    files.pressure(memory_s=2.5, io_s=4.0)
    files.write("proc/vmstat", "pswpin 0\npswpout 3\noom_kill 1\n")
    for cpu in range(2):
        folder = f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle"
        files.write(f"{folder}/core_throttle_count", "5\n")
    found = read_host(tmp_path)
    assert found["memory"]["stalled_s"] == 2.5 and found["disk"]["stalled_s"] == 4.0
    assert found["memory"]["MemAvailable"] == 800 * 1024
    assert found["memory"]["oom_kills"] == 1.0 and found["memory"]["pages_out"] == 3.0
    assert found["cpu"] == {"throttled_times": 10.0}


def test_nothing_is_there(tmp_path: Path) -> None:
    assert read_host(tmp_path) == {}


def test_this_machine_tells_of_its_memory() -> None:
    assert read_host(Path("/"))["memory"]["MemTotal"] > 0  # type: ignore[operator]
