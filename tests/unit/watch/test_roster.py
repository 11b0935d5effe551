"""A launcher's children that are ranks, and the generations of ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from boxes import MONO, Box

from commlens.blackbox import job_dirs
from commlens.processes import process
from commlens.processes.process import Stat
from commlens.processes.ranks import RankProcess
from commlens.watch.roster import Roster, children_workers

S = 1_000_000_000
NO_PROCESS = 1 << 22  # the kernel's pids are below

OF_TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}


def test_a_rank_that_ends_while_it_is_looked_at_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter("SZ")
    monkeypatch.setattr(process, "children", lambda _: [7])
    monkeypatch.setattr(process, "environment", lambda _: OF_TORCHRUN)
    monkeypatch.setattr(process, "read_stat", lambda _: Stat(100, next(states), 0.0))
    workers = children_workers(1)
    for _ in range(2):
        (worker,) = workers()
        assert (worker.rank, worker.pid, worker.start_ticks, worker.world_size) == (3, 7, 100, 4)


def test_after_a_signal_the_workers_are_looked_up_at_once(tmp_path: Path) -> None:
    """A rank may have sent it that started after the last look, a moment ago."""
    started: list[RankProcess] = []
    with contextlib.closing(Roster([tmp_path], workers=lambda: started)) as roster:
        assert roster.refresh() == []
        started.append(RankProcess(1, NO_PROCESS, 777))
        assert roster.refresh() == [], "the launcher's children are listed only every 0.1 s"
        os.write(roster.wake_fileno, b"T")
        assert roster.wait(1.0) == b"T"
        assert [member.rank for member in roster.refresh()] == [1]


@pytest.mark.parametrize(
    ("last_sign_s", "ranks"),
    [
        (9, [0, 1]),  # it was alive when the other one made its box
        (3, [1]),  # a restart
    ],
)
def test_workers_that_started_one_by_one_and_have_all_ended(
    last_sign_s: int, ranks: list[int], tmp_path: Path
) -> None:
    """Ray starts the workers of a job some seconds apart, and ends all as soon as one fails."""
    here = job_dirs.this_machine()
    about = {"boot_id": here.boot_id, "pid_namespace": here.pid_namespace}
    for rank, begins_s in ((0, 0), (1, 5)):
        box = Box(
            rank, 2, pid=NO_PROCESS + rank, start_ticks=777 + 100 * begins_s, host="", about=about
        )
        box.write_header(mono=MONO + begins_s * S)
        box.heartbeat(MONO + (begins_s or last_sign_s) * S)
        (tmp_path / job_dirs.box_name(rank, NO_PROCESS + rank)).write_bytes(box.bytes())
    roster = Roster([tmp_path])
    roster.refresh()
    assert [member.rank for member in roster.current()] == ranks
