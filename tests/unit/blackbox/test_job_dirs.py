"""The folders of jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commlens.blackbox import job_dirs


def test_a_jobs_name_does_not_depend_on_the_parent() -> None:
    """Rank 0 may start the others, or a shell each of them: the place where they meet is the same."""
    program = (
        "import sys; from commlens.blackbox import job_dirs; print(job_dirs.job_identity({},"
        " sys.argv[1]))"
    )

    def name(place: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program, place], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert (
        job_dirs.job_identity({}, "tcp://127.0.0.1:29500")
        == name("tcp://127.0.0.1:29500")
        != name("tcp://127.0.0.1:29501")
    )
    assert job_dirs.job_identity({}) == name(""), "what one command of a shell starts"


def test_a_folder_with_two_names_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm, user, link, tmp = (tmp_path / name for name in ("shm", "user", "link", "tmp"))
    for folder in (shm, user, tmp):
        folder.mkdir()
    link.symlink_to(shm)
    there = {"/dev/shm": shm, f"/run/user/{os.getuid()}": user, "/run/shm": link, "/tmp": tmp}
    monkeypatch.setattr(job_dirs, "Path", lambda path: there.get(path, tmp_path / "no"))
    monkeypatch.setattr(job_dirs, "memory_backed", lambda path: True)
    assert job_dirs.box_roots(None) == [shm, user, tmp], "the best first"
