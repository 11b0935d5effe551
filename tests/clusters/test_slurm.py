"""Jobs in a real Slurm: what the job's output says, and what commlens reads in it afterwards.

``make clusters`` runs these, as root on a machine with Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.slurm import Slurm, cluster, why_not

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

SLEEPS = """
import os, sys, time
import torch, torch.distributed as dist
os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
dist.init_process_group("gloo")
for step in range(100_000):
    if step == 5 and dist.get_rank() == 3:
        print("rank 3 sleeps", flush=True)
        time.sleep(600)
    dist.all_reduce(torch.ones(4))
"""
KILLED = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10):
    dist.all_reduce(torch.ones(4))
    if step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
STALL_TIMEOUT = 20


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


Batch = Callable[[str, str], Path]


@pytest.fixture
def batch(slurm: Slurm, tmp_path: Path) -> Batch:
    """Write a batch script that runs commands beside a program. Returns the script's path."""

    def write(program: str, commands: str) -> Path:
        (tmp_path / "train.py").write_text(program)
        script = tmp_path / "job.sh"
        script.write_text(
            f"#!/bin/bash\nexport PATH={Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1\n"
            f"export MASTER_ADDR=127.0.0.1 MASTER_PORT=29617\n"
            f"export COMMLENS_DUMP_DIR={tmp_path}/dumps COMMLENS_BOX_DIR={tmp_path}/boxes\n"
            f"cd {tmp_path}\n{commands}\n"
        )
        return script

    return write


def wait_for(file: Path, text: str, timeout_s: float = 90.0) -> None:
    until = time.monotonic() + timeout_s
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < until, file.read_text() if file.exists() else "no output"
        time.sleep(0.2)


def diagnosed(file: Path) -> dict[str, Any]:
    """Return what ``commlens diagnose`` says of the job's output."""
    done = subprocess.run(
        [sys.executable, "-m", "commlens", "diagnose", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict


def test_the_verdict_of_ranks_that_srun_started_is_in_the_jobs_output(
    slurm: Slurm, batch: Batch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = f"srun commlens run --stall-timeout {STALL_TIMEOUT} --abort-on stall train.py"
    job = slurm.submit(batch(SLEEPS, command), "-N2", "-n4", f"--output={out}")
    slurm.wait_for_end(job)
    said = " ".join(out.read_text().split())
    assert "VERDICT rank 3 never reached all_reduce #6 of the default group [0-3]" in said
    assert "ending the job, because abort_on includes stall" in said
    [verdict] = tmp_path.glob(f"dumps/train-*-{job}*/verdict.json")
    assert json.loads(verdict.read_text())["culprits"] == [3]


@pytest.mark.parametrize(
    ("end", "ending", "do", "nodes"),
    [
        ("cancel", "cancelled", "stop", []),
        ("down", "node-failure", "exclude-node", ["n2"]),
        ("preempt", "preemption", "retry", []),
        ("limit", "time-limit", "retry", []),
    ],
)
def test_slurm_ends_a_job(
    slurm: Slurm, batch: Batch, tmp_path: Path, end: str, ending: str, do: str, nodes: list[str]
) -> None:
    out = tmp_path / "out"
    limit = ["--time=0:30"] if end == "limit" else []
    job = slurm.submit(
        batch(SLEEPS, "srun python train.py"),
        "-N2", "-n4", "--requeue" if end == "preempt" else "--no-requeue", f"--output={out}", *limit,
    )  # fmt: skip
    wait_for(out, "rank 3 sleeps")
    if end == "cancel":
        slurm.run("scancel", job)
    elif end == "down":
        slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    elif end == "preempt":
        other = tmp_path / "other.sh"
        other.write_text("#!/bin/bash\nsleep 1\n")
        slurm.submit(other, "-N2", "-n16", "--partition=high", f"--output={tmp_path}/other")
        wait_for(out, "PREEMPTION")
        slurm.run("scancel", job)
    slurm.wait_for_end(job)
    slurm.run("scontrol", "update", "nodename=n2", "state=resume", check=False)
    verdict = diagnosed(out)
    assert verdict["cause"]["ending"] == ending
    assert verdict["action"]["do"] == do
    assert verdict["action"].get("nodes", []) == nodes


def test_a_job_is_requeued_by_the_exit_status_until_the_fault_comes_again(
    slurm: Slurm, batch: Batch, tmp_path: Path
) -> None:
    """The recipe of docs/clusters.md."""
    out = tmp_path / "out"
    script = batch(
        KILLED,
        "commlens launch --nproc-per-node 2 --standalone --exit-by-action train.py\n"
        "status=$?; echo status $status\n"
        '[ $status -ne 75 ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 5 ]'
        ' || scontrol requeue "$SLURM_JOB_ID"\n'
        "exit $status",
    )
    job = slurm.submit(script, "-N1", "-n1", "--requeue", "--open-mode=append", f"--output={out}")
    wait_for(out, "status 75")
    wait_for(out, "status 77", 200)
    state = slurm.wait_for_end(job)
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("FAILED", "1", "77:0")
