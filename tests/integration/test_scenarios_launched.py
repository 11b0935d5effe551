"""Scenarios as a user meets them: through `commlens demo`, `commlens launch`, and with COMMLENS=1
in the environment alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chosen import long
from harness import Harness
from more_scenarios import find
from zygote_client import Zygote

from commlens.blackbox import job_dirs
from conftest import RunCommlens

SOURCE = Path(__file__).parents[2] / "src"


def call(
    zygote: Zygote, *command: str, folder: Path, timeout_s: float = 80
) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", *command)
    return zygote.call(command, env=environment(), cwd=folder, timeout_s=timeout_s)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def skip_where_impossible(name: str) -> None:
    reason = find(name).impossible()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("data-loader", 4),
        long("dies-exception", 2),
        long("mismatch-reduce-op", 4),
        long("healthy-plain", 2),
    ],
)
def test_demo_finds_the_truth(zygote: Zygote, tmp_path: Path, name: str, world_size: int) -> None:
    skip_where_impossible(name)
    ranks = () if world_size == 4 else ("--nproc-per-node", str(world_size))
    done = call(
        zygote,
        "commlens",
        "demo",
        name,
        *ranks,
        "--dump-dir",
        str(tmp_path / "dumps"),
        folder=tmp_path,
    )
    print(done.stdout, done.stderr, sep="\n--- stderr\n")
    assert done.returncode == 0
    assert "step 5 loss" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Next: ")
    if name == "data-loader":
        assert "VERDICT" in done.stdout + done.stderr
        assert "load_batch" in done.stdout + done.stderr
    jobs = list((tmp_path / "dumps").glob("*"))
    assert len(jobs) == (0 if name == "healthy-plain" else 1)
    if jobs:
        read = call(zygote, "commlens", "diagnose", "--json", str(jobs[0]), folder=tmp_path)
        assert read.returncode == 1
        assert json.loads(read.stdout)["culprits"] == list(find(name).truth(world_size).culprits)


def test_demo_lists_its_scenarios(run_commlens: RunCommlens) -> None:
    done = run_commlens("demo", "--list")
    assert done.returncode == 0
    assert "data-loader" in done.stdout
    assert "healthy-plain" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-thing"], "no scenario 'no-such-thing'"),
        (["--nproc-per-node", "3"], "4, 8"),
        (["mismatch-root", "--nproc-per-node", "2"], "4, 8"),
    ],
)
def test_demo_refuses_unknown_scenarios_and_sizes(
    run_commlens: RunCommlens, arguments: list[str], words: str
) -> None:
    done = run_commlens("demo", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.long
@pytest.mark.timeout(100)
def test_launch_leaves_a_healthy_job_alone(zygote: Zygote, tmp_path: Path) -> None:
    """The same output and status as torchrun's, nothing said, nothing left."""
    arguments = ["--nproc-per-node", "2", "-m", "commlens.scenarios", "healthy-plain"]
    watched = call(zygote, "commlens", "launch", *arguments, folder=tmp_path)
    print(watched.stdout, watched.stderr, sep="\n--- stderr\n")
    plain = call(zygote, "torch.distributed.run", *arguments, folder=tmp_path)
    assert watched.returncode == plain.returncode == 0
    assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert "commlens" not in watched.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", ["dies-sigkill", long("data-loader"), long("swap-two-groups")])
def test_detached_watcher_reports_the_fault(jobs: Harness, tmp_path: Path, name: str) -> None:
    skip_where_impossible(name)
    """With COMMLENS=1 alone, the lowest rank starts a watcher, which outlives it and ends with the
    job.
    """
    result = jobs.run_job(find(name), 4, tmp_path, detached=True)
    print(result)
    assert "VERDICT" in result.outputs[0]
    assert "rank 2" in result.outputs[0]
    assert not result.boxes_left
    assert list((tmp_path / "dumps").glob("*/rank2.*.box"))


@pytest.mark.timeout(90)
def test_detached_watcher_is_silent_about_health(jobs: Harness, tmp_path: Path) -> None:
    skip_where_impossible("healthy-2d")
    result = jobs.run_job(find("healthy-2d"), 4, tmp_path, detached=True)
    print(result)
    assert set(result.exits.values()) == {0}
    assert len(result.results()) == 12 + 4
    assert all("commlens" not in output for output in result.outputs.values())
    assert not result.boxes_left


@pytest.mark.timeout(100)
def test_demo_leaves_nothing_behind_when_interrupted(zygote: Zygote, tmp_path: Path) -> None:
    def job_folders() -> set[Path]:
        return {
            job
            for job in job_dirs.live_jobs(None)
            if job.name.startswith("commlens.scenarios") or "scenarios" in job.name
        }

    before = job_folders()
    process = zygote.popen(
        [sys.executable, "-m", "commlens", "demo", "healthy-plain", "--nproc-per-node", "2"],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 0"):
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=40)
        print(rest)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while job_folders() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not job_folders() - before
