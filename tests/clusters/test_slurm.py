"""Jobs in a real Slurm: what the job's output says, and what commlens reads in it afterwards.

``make clusters`` runs these, as root on a machine with Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.daemons import PATIENCE_S
from clusters.slurm import Slurm, cluster, why_not
from conftest import REPOSITORY

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(480),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

# All ranks have loaded torch before the first one waits: on a busy machine, that takes longer than
# the stall timeout.
SLEEPS = """
import os, time
import torch, torch.distributed as dist
os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
open("loaded-" + os.environ["RANK"], "w").close()
while sum(name.startswith("loaded-") for name in os.listdir()) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.1)
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


def wait_for(file: Path, text: str, timeout_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + timeout_s
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < until, file.read_text() if file.exists() else "no output"
        time.sleep(0.2)


def wait_for_again(file: Path, text: str, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while file.read_text().count(text) < 2:
        assert time.monotonic() < until, file.read_text()
        time.sleep(0.5)


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
    comment = block_after("To see the verdict in the job's comment")
    command = f"srun commlens run --stall-timeout {STALL_TIMEOUT} --abort-on stall train.py"
    job = slurm.submit(batch(SLEEPS, f"{comment}\n{command}"), "-N2", "-n4", f"--output={out}")
    slurm.wait_for_end(job)
    shown = slurm.run("scontrol", "show", "job", job)
    assert "Comment=rank 3 never reached all_reduce #6 of the default group [0-3]" in shown
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


def block_after(passage: str) -> str:
    """Return the commands that follow a passage of docs/clusters.md."""
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    return page.split(passage)[1].split("```bash\n")[1].split("```")[0]


def script_of(passage: str) -> str:
    """Return the commands of the batch script that follows a passage of docs/clusters.md."""
    return block_after(passage).split("\n", 2)[2]


def recipe() -> str:
    """Return the commands of the script that starts itself again."""
    script = script_of("saved as `job.sh`")
    return script.replace("--nproc-per-node 8", "--nproc-per-node 2 --standalone")


def test_a_job_is_requeued_by_the_exit_status_until_the_fault_comes_again(
    slurm: Slurm, batch: Batch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job = slurm.submit(
        batch(KILLED, recipe()),
        "-N1", "-n1", "--requeue", "--open-mode=append", f"--output={out}",
    )  # fmt: skip
    wait_for(out, "ChildFailedError")
    first = diagnosed(out)
    assert (first["cause"]["why"], first["culprits"]) == ("killed", [1])
    wait_for_again(out, "ChildFailedError", 200)
    state = slurm.wait_for_end(job)
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("FAILED", "1", "77:0")
    second = diagnosed(out)
    assert second["looked_at"].endswith(f"the last of 2 attempts in {out}")
    assert json.loads((tmp_path / f"verdict-{job}.json").read_text())["verdict"]["action"] == {
        "do": "stop",
        "because": "killed",
        "confidence": "medium",
        "nodes": [socket.gethostname()],
        "line": "train.py:6",
        "attempts": 2,
    }


KILLED_ON_ONE_NODE = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = int(os.path.exists("again"))
for step in range(10):
    dist.all_reduce(torch.ones(4))
    if step == 5 and dist.get_rank() == rank and os.uname().nodename == "n1":
        open("again", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""
# each node of this cluster is this machine: its jobs are given the name of their node
AS_NODE = (
    'if [ "$NAMED" != "$SLURM_JOB_ID" ]; then export NAMED=$SLURM_JOB_ID\n'
    'exec unshare --uts --mount bash -c "mount --bind hosts /etc/hosts'
    ' && hostname $SLURMD_NODENAME && exec bash $0"; fi\n'
)


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed (apt install jq).")
def test_a_job_goes_on_without_the_node_that_is_at_fault_twice(
    slurm: Slurm, batch: Batch, tmp_path: Path
) -> None:
    script = batch(KILLED_ON_ONE_NODE, AS_NODE + recipe())
    known = Path("/etc/hosts").read_text()
    (tmp_path / "hosts").write_text(f"{known}\n127.0.0.1 localhost {socket.gethostname()} n1 n2\n")
    options = ("-N1", "-n1", "--open-mode=append", f"--output={tmp_path}/%j.out")
    first = slurm.submit(script, "-wn1", "--no-requeue", *options)
    assert slurm.wait_for_end(first)["ExitCode"] == "75:0"
    second = slurm.submit(script, "-wn1", "--no-requeue", *options)
    assert slurm.wait_for_end(second)["ExitCode"] == "76:0"
    said = (tmp_path / f"{second}.out").read_text()
    third = said.split("Submitted batch job ")[1].split()[0]
    state = slurm.wait_for_end(third)
    assert (state["JobState"], state["NodeList"], state["ExcNodeList"]) == ("COMPLETED", "n2", "n1")


BY_TASK = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(20):
    dist.all_reduce(torch.ones(4))
    if step == 5 and os.environ["SLURM_ARRAY_TASK_ID"] == "1" and dist.get_rank() == 1:
        time.sleep(600)
    if step == 5 and os.environ["SLURM_ARRAY_TASK_ID"] == "2" and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def test_each_task_of_an_array_has_its_own_verdict(
    slurm: Slurm, batch: Batch, tmp_path: Path
) -> None:
    commands = script_of("A job array").replace("-node 8", "-node 2")
    settings = f"export COMMLENS_STALL_TIMEOUT={STALL_TIMEOUT} COMMLENS_ABORT_ON=stall\n"
    job = slurm.submit(
        batch(BY_TASK, settings + commands),
        "-N1", "-n1", "--array=0-2", f"--output={tmp_path}/%a.out",
    )  # fmt: skip
    ids = {}
    for task in range(3):
        ended = slurm.wait_for_end(f"{job}_{task}")
        ids[task] = ended["JobId"]
        assert ended["JobState"] == ("FAILED" if task else "COMPLETED")
    well, late, killed = (" ".join((tmp_path / f"{n}.out").read_text().split()) for n in range(3))
    assert "VERDICT" not in well
    assert late.count("VERDICT") == killed.count("VERDICT") == 1
    assert "VERDICT rank 1 never reached all_reduce #7 of the default group [0-1]" in late
    assert "VERDICT rank 0 died of SIGKILL" in killed
    dumps = {path.parent.name: json.loads(path.read_text()) for path in verdicts(tmp_path)}
    # train-DATE-TIME-SLURM_JOB_ID-PID
    culprits = {name.split("-")[3]: each["culprits"] for name, each in dumps.items()}
    assert culprits == {ids[1]: [1], ids[2]: [0]}
    assert all(sum(1 for _ in (tmp_path / "dumps" / name).glob("*.box")) == 2 for name in dumps)


def verdicts(folder: Path) -> list[Path]:
    return sorted(folder.glob("dumps/*/verdict.json"))


LATE = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100_000):
    if step == 5 and dist.get_rank() == 3:
        time.sleep(600)
    dist.all_reduce(torch.ones(4))
"""
# gives a task the name of its node, and black boxes of its own
NODE = """#!/bin/bash
exec unshare --uts --mount bash -c 'mount --bind hosts /etc/hosts && hostname $SLURMD_NODENAME \
&& export COMMLENS_BOX_DIR=$PWD/boxes-$SLURMD_NODENAME && exec "$@"' node "$@"
"""


@pytest.mark.parametrize("launcher", ["commlens launch", "COMMLENS=1 torchrun"])
def test_one_launcher_a_node(slurm: Slurm, batch: Batch, tmp_path: Path, launcher: str) -> None:
    commands = script_of("With one launcher a node").replace("commlens launch", launcher)
    commands = commands.replace("-node=8", "-node=2").replace("srun bash", "srun ./node.sh bash")
    (tmp_path / "node.sh").write_text(NODE)
    (tmp_path / "node.sh").chmod(0o755)
    known = Path("/etc/hosts").read_text()
    (tmp_path / "hosts").write_text(f"{known}\n127.0.0.1 localhost {socket.gethostname()} n1 n2\n")
    out = tmp_path / "out"
    job = slurm.submit(
        batch(LATE, f"export COMMLENS_STALL_TIMEOUT={STALL_TIMEOUT} COMMLENS_ABORT_ON=stall\n{commands}"),
        "-N2", "--ntasks-per-node=1", f"--output={out}",
    )  # fmt: skip
    state = slurm.wait_for_end(job)
    said = " ".join(out.read_text().split())
    assert (state["JobState"], state["NumNodes"]) == ("FAILED", "2"), said
    # torchrun's summary repeats it, indented
    assert len(re.findall(r"^VERDICT", out.read_text(), re.MULTILINE)) == 1
    assert "VERDICT rank 3 never reached all_reduce #6 of the default group [0-3]" in said
    assert "(the whole verdict was printed on n1)" in said
    [verdict] = verdicts(tmp_path)
    assert f"-{job}-" in verdict.parent.name
    assert sum(1 for _ in verdict.parent.glob("*.box")) == 4
    assert json.loads(verdict.read_text())["culprits"] == [3]
    assert "host n2" in said
