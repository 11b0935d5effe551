"""`commlens trace` and `commlens launch --trace`: a script that knows nothing of it is traced, and
otherwise left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from zygote_client import Zygote

from commlens.launch.worker import show_from_program
from conftest import SOURCE

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(180)

TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn

def main():
    how = sys.argv[1]
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    os.write(1, (f"argv {sys.argv} {__name__} {os.path.basename(sys.modules['__main__'].__file__)} {sys.modules['__main__'].__annotations__}" + chr(10)).encode())
    if how == "die" and dist.get_rank() == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "die":
        dist.TCPStore("127.0.0.1", 0, 1, True).get("never set")  # blocks in C++
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    STEPS: int = 4; main()
"""


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }


def run(
    zygote: Zygote, cwd: Path, *command: str, expect: int | None = 0
) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", *command)
    done = zygote.call(command, env=environment(), cwd=cwd, timeout_s=100)
    assert expect is None or done.returncode == expect, done.stdout + done.stderr
    return done


def load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def collectives(data: dict[str, Any]) -> list[tuple[Any, ...]]:
    def owner(event: dict[str, Any]) -> Any:
        found = event.get("owner")
        return found and (found["library"], found["name"], sorted(found["parameters"]))

    return [
        (
            e["op"],
            e["phase"],
            e.get("site"),
            owner(e),
            e.get("input_bytes", 0),
            e.get("step", 0),
            (e.get("source") or {}).get("line"),
        )
        for e in data["events"]
    ]


@pytest.fixture(scope="module")
def traced(
    zygote: Zygote,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Two ranks under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "train.py").write_text(TRAIN)
    return folder, run(
        zygote,
        folder,
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "commlens",
        "trace",
        "train.py",
        "well",
        "--steps",
        "x",
    )


def test_every_rank_saves_a_file_and_the_first_says_so(traced):
    folder, done = traced
    assert sorted(path.name for path in folder.joinpath("commlens-trace").iterdir()) == [
        "trace-rank0.json",
        "trace-rank1.json",
    ]
    hint, *said = [line for line in done.stderr.splitlines() if line.startswith("commlens: ")]
    assert hint.startswith("commlens: --steps stands after train.py, so train.py gets it")
    assert len(said) == 4
    assert (
        "over 4 optimizer steps and the setup before them (3 collectives and 1.2 kB), rank 0 of 2"
        in said[0]
    )
    assert "commlens view commlens-trace/trace-rank0.json" in said[-1]
    for rank in (0, 1):
        data = load(folder / "commlens-trace" / f"trace-rank{rank}.json")
        assert (data["rank"], data["world_size"], data["steps"], data["script"]) == (
            rank,
            2,
            4,
            "train.py well --steps x",
        )
        assert data["coverage"]["unclassified"] == 0
        assert data["coverage"]["dispatched"] == data["coverage"]["recorded"] == len(data["events"])
        assert {event["op"] for event in data["events"]} == {
            "all_gather",
            "broadcast",
            "all_reduce",
            "barrier",
        }
        (group,) = data["groups"]
        # the script had destroyed it when the trace was saved
        assert (group["ranks"], group["backend"]) == ([0, 1], "gloo")


def test_the_script_is_itself(traced):
    _, done = traced
    assert (
        done.stdout.splitlines()
        == ["argv ['train.py', 'well', '--steps', 'x'] __main__ train.py {'STEPS': <class 'int'>}"]
        * 2
    )


def test_a_preview_shows_what_the_real_run_issued(traced, tmp_path, call_commlens):
    folder, _ = traced
    options = ("--world-size", "2", "--rank", "1", "--output", "x.json")
    done = call_commlens("preview", *options, str(folder / "train.py"), "well")
    assert done.returncode == 0, done.stderr
    real = load(folder / "commlens-trace" / "trace-rank1.json")
    previewed = load(tmp_path / "x.json")
    assert collectives(previewed) == collectives(real)
    assert [m["path"] for m in previewed["modules"]] == [m["path"] for m in real["modules"]]


def test_launch_traces_some_steps_and_a_rank_that_torchrun_ends_saves_too(zygote, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    began = time.monotonic()
    done = run(
        zygote,
        tmp_path,
        "commlens",
        "launch",
        "--trace=1:3",
        "--trace-dir",
        "traces",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
        "die",
        "--trace",
        expect=1,
    )
    assert time.monotonic() - began < 60
    assert done.stdout.splitlines() == (
        ["argv ['train.py', 'die', '--trace'] __main__ train.py {'STEPS': <class 'int'>}"] * 2
    )
    assert [path.name for path in tmp_path.joinpath("traces").iterdir()] == ["trace-rank0.json"]
    data = load(tmp_path / "traces" / "trace-rank0.json")
    assert {event.get("step", 0) for event in data["events"]} == {1, 2}
    assert data["steps"] == 2  # of those that were to be traced
    # whose torchrun lists only those that it did not end itself
    if not version("torch").startswith("2.6."):
        assert f"exitcode  : {-signal.SIGTERM}" in done.stderr  # it died of what it was sent
    assert "rank 0 of 2" in done.stderr
    assert "commlens view traces/trace-rank0.json shows the whole trace" in done.stderr


ALONE = """
import os, sys, torch
from torch import nn
parameter = nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
parameter.sum().backward()
optimizer.step()
os.chdir("/")
how = sys.argv[1]
if how == "raise": raise ValueError("a bad batch")
if how == "interrupt": raise KeyboardInterrupt
if how == "fork" and os.fork() == 0: sys.exit(0)
if how == "fork": os.wait()
sys.exit(7)
"""


@pytest.fixture(scope="module")
def alone(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, int, str, str]]:
    """The script in each of its ways, side by side: for each the folder, the exit status and both
    outputs.
    """
    started = {}
    for how in ("raise", "interrupt", "fork", "unsaved"):
        folder = tmp_path_factory.mktemp(how)
        (folder / "alone.py").write_text(ALONE)
        if how == "unsaved":
            (folder / "out").write_text("a file, no folder")
        command = [sys.executable, "-m", "commlens", "trace", "--output", "out", "alone.py", how]
        started[how] = (
            folder,
            zygote.popen(
                command,
                env=environment(),
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ),
        )
    ended = {}
    for how, (folder, process) in started.items():
        try:
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
        ended[how] = folder, process.returncode, out, err
    return ended


@pytest.mark.parametrize(
    ("how", "status"), [("raise", 1), ("interrupt", -signal.SIGINT), ("fork", 7)]
)
def test_a_process_without_ranks_is_traced_and_its_end_is_its_own(alone, how, status):
    folder, returncode, out, err = alone[how]
    assert returncode == status, err
    data = load(folder / "out" / "trace.json")
    assert (data["rank"], data["world_size"], data["steps"], data["events"]) == (0, 1, 1, [])
    assert out == ""
    assert err.count("commlens: commlens view") == 1
    if how in ("raise", "interrupt"):
        assert err.count("  File ") == 1
        assert ("ValueError: a bad batch\n" if how == "raise" else "KeyboardInterrupt\n") in err


def test_a_traceback_leaves_out_the_installed_command():
    def program() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        exec(
            compile("def main():\n    program()\nmain()", "/usr/local/bin/commlens", "exec"),
            {"program": program},
        )
    error = raised.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test
    show_from_program(error)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["program"]


def test_a_trace_that_cannot_be_saved_does_the_job_no_harm(alone):
    _, returncode, _, err = alone["unsaved"]
    assert returncode == 7
    (line,) = err.splitlines()
    assert "could not save its trace" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "The program nothing.py cannot be read"),
        ([], "Which program?"),
        (["--steps", "3:1", "alone.py", "exit"], "is not a range of steps: give FIRST:LAST"),
    ],
)
def test_wrong_usage_is_a_sentence(tmp_path, call_commlens, arguments, message):
    (tmp_path / "alone.py").write_text(ALONE)
    done = call_commlens("trace", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("commlens: ")
    assert message in done.stderr
    assert not (tmp_path / "commlens-trace").exists()
