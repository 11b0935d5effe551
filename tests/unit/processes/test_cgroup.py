"""The limits of a process's control group."""

from __future__ import annotations

import os
from pathlib import Path

from commlens.processes.cgroup import Cgroup


def test_cgroup_v2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "cpu.stat").write_text(
        "usage_usec 5\nnr_periods 9\nnr_throttled 4\nthrottled_usec 2500000\n"
    )
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (tmp_path / "memory.pressure").write_text(
        "some avg10=9.00 avg60=0 avg300=0 total=1\nfull avg10=7.25 avg60=0 avg300=0 total=1\n"
    )
    seen = Cgroup([tmp_path], [tmp_path]).read()
    assert (seen.throttled_s, seen.oom_kills, seen.memory_pressure) == (2.5, 2, 7.25)


def test_cgroup_v1_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    seen = Cgroup([tmp_path], [tmp_path]).read()
    assert (seen.throttled_s, seen.oom_kills) == (1.5, 1)
    nothing = Cgroup().read()
    assert (nothing.throttled_s, nothing.oom_kills) == (None, None)


def test_cgroup_is_found_for_a_real_process() -> None:
    Cgroup.of(os.getpid()).read()
    assert Cgroup.of(2**22 + 1).cpu == [], "no such process: no files"
