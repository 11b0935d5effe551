"""What a rank of this node is doing, seen from outside of its process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from watch_ranks import Rank, eventually

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import read_box
from commlens.processes.observer import SILENT_S
from commlens.verification.whereabouts import whereabouts

pytestmark = pytest.mark.launches


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """A rank whose watchdog thread has not run for a while."""
    rank = Rank(tmp_path, 1, 2)
    rank.tell("where load_batch")
    rank.tell("silence")
    yield rank
    rank.end()


def silent_s(folder: Path, rank: Rank) -> float:
    log = read_box(folder / job_dirs.box_name(1, rank.pid))
    return (log.captured_ns - log.heartbeat_ns) / 1e9


def test_a_rank_that_could_run_and_does_not(tmp_path: Path, rank: Rank) -> None:
    assert whereabouts(tmp_path, {1: rank.pid})[1].startswith("is in train.py:57 ")
    eventually(lambda: silent_s(tmp_path, rank) > SILENT_S)
    assert whereabouts(tmp_path, {1: rank.pid})[1].endswith("s (is the GIL held?)")
    assert whereabouts(tmp_path, {1: rank.pid}, watch=False) == {1: ""}


def test_a_rank_without_a_core(tmp_path: Path, rank: Rank) -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    os.sched_setaffinity(rank.pid, {core})
    os.setpriority(os.PRIO_PROCESS, rank.pid, 19)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        rank.tell("spin 60", answers=False)
        eventually(lambda: silent_s(tmp_path, rank) > SILENT_S)
        assert whereabouts(tmp_path, {1: rank.pid}) == {1: ""}
        neighbour.kill()
