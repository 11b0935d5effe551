"""Handles of processes whose end is to be known."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from watch_ranks import eventually, sleeper

from commlens.blackbox import job_dirs
from commlens.processes.early_handles import EarlyHandles
from commlens.processes.process import ProcessEnding

pytestmark = pytest.mark.launches


def test_handles_are_opened_as_soon_as_there_is_a_box(tmp_path: Path) -> None:
    early = EarlyHandles(tmp_path)
    with sleeper() as killed, sleeper() as running:
        started = {child.pid: job_dirs.start_ticks(child.pid) for child in (killed, running)}
        for rank, pid in enumerate(started):
            (tmp_path / job_dirs.box_name(rank, pid)).touch()
        eventually(lambda: len(early._handles) == 2)
        before_ns = time.time_ns()
        os.kill(killed.pid, signal.SIGKILL)
        eventually(lambda: early._handles[killed.pid].ended_ns > 0)
        killed.wait(10)
        early.stop()
        handles = [early.take(pid, ticks) for pid, ticks in started.items()]
        assert [handle.ending() for handle in handles if handle is not None] == [
            ProcessEnding(signal="SIGKILL"),
            None,
        ]
        assert handles[0] is not None
        assert 0 < handles[0].ended_ns - before_ns < 5e9
        assert early.take(running.pid, 1) is None, "another start time is another process"
        running.kill()
    early.close()
