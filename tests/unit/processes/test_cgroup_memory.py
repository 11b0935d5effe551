"""The memory that is free, by the control groups of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.processes import cgroup


@pytest.fixture
def control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the group that contains this process's."""
    outer = tmp_path / "outer"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    for folder in (outer, inner):
        (folder / "cgroup.procs").write_text("")
        (folder / "memory.max").write_text("max\n")
        (folder / "memory.current").write_text("1000\n")
    monkeypatch.setattr(
        cgroup.Cgroup, "of", classmethod(lambda cls, pid, root: cls(memory=[inner]))
    )
    return outer


def test_without_a_limit_the_machine_decides(control_group: Path) -> None:
    free = cgroup.free_memory(control_group.parent)
    assert free is not None and free > 10_000_000


def test_the_limit_of_a_group_around_ours_counts(control_group: Path) -> None:
    (control_group / "memory.max").write_text("5000\n")
    assert cgroup.free_memory(control_group.parent) == 4000
    (control_group / "memory.stat").write_text("anon 600\ninactive_file 300\n")
    assert cgroup.free_memory(control_group.parent) == 4300
    (control_group / "memory.max").write_text("100\n")
    assert cgroup.free_memory(control_group.parent) == 0


def test_version_1(control_group: Path) -> None:
    inner = control_group / "inner"
    for name in ("memory.max", "memory.current"):
        (inner / name).unlink()
    (inner / "memory.limit_in_bytes").write_text("7000\n")
    (inner / "memory.usage_in_bytes").write_text("2000\n")
    assert cgroup.free_memory(control_group.parent) == 5000
