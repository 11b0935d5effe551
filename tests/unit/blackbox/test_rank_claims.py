"""Ranks that exist twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commlens.blackbox import job_dirs, rank_claims
from commlens.blackbox.writer import BoxWriter
from commlens.capture import job_box
from commlens.capture.rank_environment import PlaceInJob
from commlens.dumps.folder import discard


def test_a_rank_that_two_processes_have_is_told_with_who_started_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's ranks 0 and 1 spawn ranks 0 and 1 each."""
    machine, here = job_dirs.this_machine()._asdict(), os.getpid()
    launched = []
    for rank, pid in enumerate((here, os.getppid())):
        path = tmp_path / job_dirs.box_name(rank, pid)
        BoxWriter(
            path,
            capacity=4,
            rank=rank,
            world_size=2,
            local_rank=rank,
            start_ticks=job_dirs.start_ticks(pid),
            about=machine,
        )
        launched.append(path)
    place = PlaceInJob(1, 2, "file:///tmp/meeting")
    monkeypatch.setattr(job_box, "_ancestor", lambda _: (launched[0], job_dirs.owner(launched[0])))
    monkeypatch.setattr("sys.argv", ["/home/me/train.py"])
    assert job_box.twin_of(None, place) == "", "alone"  # type: ignore[arg-type]
    (claim,) = [path for path in tmp_path.iterdir() if path.name.startswith(".claim")]
    prefix = "-".join(claim.name.split("-")[:3])
    parent = next(job_dirs.owner(box).pid for box in launched[:1])  # type: ignore[union-attr]
    for other, started_by, found in (
        (1, parent, False),
        (os.getppid(), 7, False),
        (os.getppid(), os.getppid(), True),
    ):
        note = tmp_path / f"{prefix}-{other}-{job_dirs.start_ticks(other)}-{started_by}"
        note.touch()
        said = job_box.twin_of(None, place)  # type: ignore[arg-type]
        assert said.startswith("rank 1 exists twice: ") is found, said
        note.unlink()
    assert (
        f"and process {other}, which rank 1 (pid {other}) started" in said
        and "start train.py without the launcher" in said
    )
    assert job_box.twin_of(None, PlaceInJob(0, 2, "file:///tmp/meeting")) == "", "another rank"  # type: ignore[arg-type]
    discard(tmp_path)
    assert not list(tmp_path.glob(".claim*"))


def test_the_living_children_of_a_rank_are_known_by_its_pid(tmp_path: Path) -> None:
    mine = rank_claims.claim_rank(tmp_path, 1, "tcp://127.0.0.1:29501", 2, 7)
    (tmp_path / f".claim-0-{mine.group}-{mine.pid}-{mine.start_ticks + 1}-8").touch()  # has ended
    assert rank_claims.of_children(tmp_path) == {7: [mine]}
