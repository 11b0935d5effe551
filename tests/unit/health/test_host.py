"""Memory, storage and processors, read from a folder."""

from __future__ import annotations

from pathlib import Path

from node_files import NodeFiles

from commlens.health.host import has_pressure, read_host, read_nfs


def test_memory_storage_and_heat(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    files.pressure(memory_s=2.5, io_s=4.0)
    files.write("proc/vmstat", "pswpin 0\npswpout 3\noom_kill 1\n")
    for cpu in (0, 2):  # the second one is off
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


MOUNTSTATS = """device proc mounted on /proc with fstype proc
device files.example:/export/data mounted on /data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,timeo=600,retrans=2
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 900 912 3 1 1 0 0 0 0
\t       WRITE: 50 50 1 1 1 0 0 0 0
device [fe80::1]:/home mounted on /home with fstype nfs statvers=1.1
\t        READ: 7 7 0 1 1 0 0 0 0
device tmpfs mounted on /tmp with fstype tmpfs
\t        READ: 7 9 9 1 1 0 0 0 0
"""


def test_servers_of_nfs_that_did_not_answer_in_time(tmp_path: Path) -> None:
    NodeFiles(tmp_path).write("proc/self/mountstats", MOUNTSTATS)
    assert read_nfs(tmp_path) == {
        "files.example": {"timeouts": 4.0, "sent_again": 12.0},
        "[fe80::1]": {"timeouts": 0.0, "sent_again": 0.0},
    }


def test_the_limits_of_a_container(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    for name, text in (
        ("cgroup.procs", "1\n"),
        ("memory.max", "4000000000\n"),
        ("memory.current", "3900000000\n"),
        ("memory.events", "low 0\noom_kill 2\n"),
        ("cpu.max", "150000 100000\n"),
        ("cpu.stat", "usage_usec 5\nthrottled_usec 2500000\n"),
    ):
        for folder in ("", "unified/", "cpu/", "memory/"):
            files.write(f"sys/fs/cgroup/{folder}{name}", text)
    found = read_host(tmp_path)["container"]
    assert found == {
        "memory_used": 3.9e9,
        "memory_limit": 4e9,
        "oom_kills": 2.0,
        "cpu_limit": 1.5,
        "cpu_throttled_s": 2.5,
    }


def test_whether_pressure_is_measured(tmp_path: Path) -> None:
    assert not has_pressure(tmp_path)
    NodeFiles(tmp_path)
    assert has_pressure(tmp_path)
