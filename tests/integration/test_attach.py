"""``commlens attach`` and ``commlens stacks`` on a job under plain torchrun that never had
commlens: healthy, stuck, healthy again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

SOURCE = Path(__file__).parents[2] / "src"
TRAIN = """
import hashlib, os, time
import torch, torch.distributed as dist

def load_batch(step):
    while os.environ["RANK"] == "1" and os.path.exists("stall"):
        time.sleep(0.2)  # stalls here
    time.sleep(0.02)
    return torch.full((64,), float(step % 7 + dist.get_rank()))

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    weights = torch.zeros(64)
    for step in range(100_000):
        gradient = load_batch(step)
        dist.all_reduce(gradient)
        weights = weights * 0.9 + gradient
        if step == 20 and dist.get_rank() == 0:
            open("started", "w").close()
        done = torch.tensor([float(os.path.exists("finish"))])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done.item():
            break
    with open(f"result{dist.get_rank()}", "w") as file:
        file.write(f"{step} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}")
    dist.destroy_process_group()

main()
"""
SSH = """#!/bin/bash
for last; do :; done
case "$*" in *lost*) echo "lost: no route to host" >&2; exit 255;; esac
exec bash -c "$last"
"""
WORLD = 3
SCRIPT = f"train_{os.getpid()}.py"  # other jobs may run on this machine


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start torchrun without commlens; end it and its ranks afterwards."""
    if (
        shutil.which(
            "py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        is None
    ):
        pytest.skip("py-spy is not installed")
    folder = tmp_path_factory.mktemp("attach")
    (folder / SCRIPT).write_text(TRAIN)
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(WORLD),
        "--master-port",
        str(free_port()),
        SCRIPT,
    ]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _await(folder / "started", process)
            yield process, folder
        finally:
            with_children = [process.pid, *children(process.pid)]
            for pid in with_children:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait(10)


def _await(path: Path, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, (
            path.parent / "output"
        ).read_text()
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return (
        [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        if Path(f"/proc/{pid}").exists()
        else []
    )


def commlens(
    *arguments: object,
    path: str | None = None,
    prefix: tuple[str, ...] = (),
    environ: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        **({"PATH": path} if path else {}),
        **(environ or {}),
    }
    command = [*prefix, sys.executable, "-m", "commlens", *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.launches
def test_a_job_that_never_had_commlens(
    job: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    process, folder = job

    moves = commlens("attach", process.pid, "--window", "1.5")
    assert (moves.returncode, moves.stderr) == (0, "")
    assert moves.stdout.startswith("VERDICT  nothing is wrong: the job moves")

    (folder / "stall").touch()
    time.sleep(0.5)
    line = next(
        number for number, text in enumerate(TRAIN.splitlines(), 1) if "# stalls here" in text
    )
    stuck = commlens("attach", process.pid, "--window", "1", "--json")
    verdict = json.loads(stuck.stdout)
    assert stuck.returncode == 1
    assert (verdict["kind"], verdict["culprits"], verdict["victims"], verdict["confidence"]) == (
        "missing",
        [1],
        [0, 2],
        "high",
    )
    assert (verdict["source"], verdict["why"]) == (f"{SCRIPT}:{line}", "data-loading")
    assert "ranks 0,2 wait in all_reduce of the default group" in verdict["summary"]

    of_rank = commlens("stacks", children(process.pid)[1])
    assert of_rank.stdout.startswith(
        f"3 ranks of {SCRIPT} stand at 2 places:\n\nRank 1\n  load_batch "
        f" {folder}/{SCRIPT}:{line}\n"
    )
    assert "Ranks 0,2\n  all_reduce  torch/distributed/distributed_c10d.py" in of_rank.stdout

    # Two "hosts": this machine under its name, through a stand-in for ssh, and one that cannot be
    # reached.
    fake = tmp_path / "ssh"
    fake.write_text(SSH)
    fake.chmod(0o755)
    elsewhere = commlens(
        "attach",
        str(folder),
        "--hosts",
        "a,lost",
        "--window",
        "0.5",
        "--json",
        path=f"{tmp_path}:{os.environ['PATH']}",
    )
    # the command line holds no folder, so neither place has such a job
    assert elsewhere.returncode == 3
    assert "lost could not be asked: lost: no route to host" in elsewhere.stderr
    merged = commlens(
        "attach",
        SCRIPT,
        "--hosts",
        "a,lost",
        "--window",
        "0.5",
        "--json",
        path=f"{tmp_path}:{os.environ['PATH']}",
    )
    verdict = json.loads(merged.stdout)
    assert verdict["culprits"] == [
        1
    ] and "lost could not be asked: lost: no route to host." in " ".join(
        verdict["missing_evidence"]
    )

    (folder / "stall").unlink()
    (folder / "finish").touch()
    assert process.wait(30) == 0, (folder / "output").read_text()
    results = {(folder / f"result{rank}").read_text() for rank in range(WORLD)}
    assert results == {expected(int(results.copy().pop().split()[0]))}


def expected(last_step: int) -> str:
    """The result of an undisturbed run of so many steps."""
    import hashlib

    import torch

    weights = torch.zeros(64)
    for step in range(last_step + 1):
        weights = weights * 0.9 + sum(
            torch.full((64,), float(step % 7 + rank)) for rank in range(WORLD)
        )
    return f"{last_step} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}"


@pytest.mark.launches
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user"
)
def test_the_process_of_another_user_is_refused_in_one_sentence() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        refused = commlens(
            "attach", process.pid, prefix=("setpriv", "--reuid=65534", "--clear-groups")
        )
        process.kill()
    if "commlens:" not in refused.stderr:
        pytest.skip("nobody may not read this Python")
    assert refused.returncode == 3
    assert (
        refused.stderr
        == f"commlens: The process {process.pid} (sleep 60) belongs to the user root: only that"
        f" user or root can look at it (`sudo commlens attach {process.pid}`).\n"
    )
