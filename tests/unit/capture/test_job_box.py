"""A rank that starts frees boxes that nothing else would free."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.blackbox.writer import BoxWriter
from commlens.capture import job_box


def box(folder: Path, *, silent_s: float, setup: int = 0, ended: bool = True) -> Path:
    """Write a box whose process gave its last sign of life so long ago."""
    folder.mkdir()
    path = folder / job_dirs.box_name(0, os.getpid())
    # no process has this pid and this start
    start = 1 if ended else job_dirs.start_ticks(os.getpid())
    writer = BoxWriter(
        path,
        capacity=4,
        rank=0,
        world_size=2,
        local_rank=0,
        start_ticks=start,
        about=job_dirs.this_machine()._asdict(),
    )
    writer.word(L.HEARTBEAT_UNIX, time.time_ns() - int(silent_s * 1e9))
    writer.word(L.SETUP, setup)
    return path


@pytest.mark.parametrize("is_scarce", [False, True])
def test_boxes_of_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_scarce: bool
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20 if is_scarce else 1 << 40)
    )
    own = box(tmp_path / "own", silent_s=9000)
    live = box(tmp_path / "live", silent_s=9000, ended=False)
    used, unused = (
        box(tmp_path / "used", silent_s=9000, setup=64),
        box(tmp_path / "unused", silent_s=9000),
    )
    recent, just_ended = box(tmp_path / "recent", silent_s=300), box(tmp_path / "just", silent_s=20)
    job_box._free_ended_boxes(own.parent)
    assert own.exists() and live.exists() and just_ended.exists()
    assert not unused.exists()
    assert used.exists() is recent.exists() is not is_scarce


def test_a_lock_that_is_held_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_box, "_LOCK_S", 0.1)
    with job_box._locked(tmp_path), job_box._locked(tmp_path):
        pass
