"""Launchers that start ranks again by themselves: torchrun, and NVIDIA's resiliency extension.

``make clusters`` runs these; it installs the latter beside the environment of the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

pytest.importorskip("torch")
pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

FT_LAUNCHER = Path(os.environ.get("TEST_FT_LAUNCHER") or REPOSITORY / "absent")

CRASHES = """
import os, signal
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    for step in range(10):
        dist.all_reduce(torch.ones(4))
        if step == 5 and dist.get_rank() == 1:
            if CRASHES_AGAIN or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    dist.destroy_process_group()

main()
"""


def run(
    folder: Path, *command: str, again: bool, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a job of two ranks with one restart."""
    (folder / "train.py").write_text(CRASHES.replace("CRASHES_AGAIN", str(again)))
    return subprocess.run(
        [*command, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "train.py"],
        cwd=folder,
        env={
            **os.environ,
            "COMMLENS_DUMP_DIR": str(folder / "dumps"),
            "OMP_NUM_THREADS": "1",
            # else a restart may fail at an address of the former start
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_the_verdict_on_torchruns_second_attempt_says_that_the_fault_came_back(tmp_path: Path):
    alerts = tmp_path / "alerts"
    launch = (sys.executable, "-m", "commlens", "launch", "--exit-by-action")
    done = run(tmp_path, *launch, "--on-verdict", f"cat >> {alerts}", again=True)
    assert done.returncode == 77, done.stderr
    first, second = (
        json.loads(line)["verdict"]["action"] for line in alerts.read_text().splitlines()
    )
    assert (first["do"], first.get("attempts", 1)) == ("retry", 1)
    assert (second["do"], second["because"], second["attempts"]) == ("stop", "crashed", 2)
    assert (done.stdout + done.stderr).count("VERDICT") == 2
    (tmp_path / "log").write_text(done.stdout + done.stderr)
    read = [sys.executable, "-m", "commlens", "diagnose", str(tmp_path / "log")]
    said = subprocess.run(read, capture_output=True, text=True, check=False).stdout
    assert "VERDICT rank 1 died of SIGSEGV" in " ".join(said.split())
    assert "the last of 2 attempts" in " ".join(said.split())


@pytest.mark.skipif(
    not FT_LAUNCHER.exists(), reason="NVIDIA's resiliency extension could not be installed."
)
def test_the_attempt_before_a_restart_of_ft_launcher_has_its_verdict(tmp_path: Path):
    done = run(tmp_path, str(FT_LAUNCHER), again=False, COMMLENS="1")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said
    # its agent looks for ended workers ten times a second, and may collect one before the watcher
    how = "died of SIGSEGV|is gone; how it ended was not observed"
    assert re.search(f"VERDICT rank 1 ({how}); rank 0 was waiting for it in all_reduce #7", said), (
        said
    )
    [file] = tmp_path.glob("dumps/*/verdict.json")
    assert json.loads(file.read_text())["action"]["do"] in ("retry", "unknown")
