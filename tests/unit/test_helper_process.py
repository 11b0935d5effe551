"""Processes of commlens's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from commlens import helper_process


def test_it_is_not_recorded_and_torch_loads_nothing_of_ours_in_it() -> None:
    environ = helper_process.environment({"COMMLENS": "1", "COMMLENS_JOB": "x", "HOME": "/root"})
    assert environ == {"COMMLENS_JOB": "x", "HOME": "/root", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_it_finds_this_commlens_wherever_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"beside{os.pathsep}{os.pathsep}/absolute")
    own, *others = helper_process.python_path().split(os.pathsep)
    assert (Path(own) / "commlens" / "helper_process.py").exists()
    assert others == [str(tmp_path / "beside"), "/absolute"]


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert helper_process.folder() == "/"
    monkeypatch.chdir("/")


@pytest.mark.launches
def test_it_is_no_child_of_ours(tmp_path: Path) -> None:
    (tmp_path / "helping.py").write_text("import os, sys, time\nopen(sys.argv[1], 'w').close()\n")
    pid = helper_process.start(
        "helping",
        str(tmp_path / "ran"),
        environ={**os.environ, "PYTHONPATH": str(tmp_path)},
        is_silent=True,
    )
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=30, check=True)
    assert (tmp_path / "ran").exists()
