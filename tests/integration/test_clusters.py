"""The launchers of clusters, each as it starts ranks there: a late rank and a killed one are named,
and the job gets one dump.

The nodes are emulated; srun and mpirun have stand-ins that set the variables of the real ones.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chosen import long
from emulated_nodes import Node, nodes, wait

HERE = Path(__file__).parent
PYTHON = sys.executable
LATE_S = "6"
PROGRAM = [str(HERE / "cluster_program.py"), LATE_S]
Start = Callable[[list[Node], dict[str, str]], None]


def name_hosts(made: list[Node]) -> None:
    """Let the nodes know each other's names, as on a cluster, and the first one's service. The
    kernel shows this to no other process.
    """
    lines = [f"{node.address} node{node.number}" for node in made] + [
        f"{made[0].address} train-master-0",
        "127.0.0.1 localhost",
    ]
    for node in made if made[0].isolated else []:
        hosts = Path("/etc/netns") / node.namespace / "hosts"
        hosts.parent.mkdir(parents=True)
        hosts.write_text("\n".join(lines) + "\n")


def stand_in(launcher: str, made: list[Node], settings: dict[str, str]) -> None:
    """Start the tasks with COMMLENS=1 as the only change, as in an sbatch script or with ``mpirun
    -x COMMLENS=1``.
    """
    for node in made:
        command = [
            PYTHON,
            str(HERE / "cluster_launchers.py"),
            launcher,
            str(node.number),
            str(len(made)),
            str(2 // len(made)),
        ]
        where = {"MASTER_ADDR": made[0].address, "MASTER_PORT": "29511", "COMMLENS": "1"}
        node.start([*command, PYTHON, *PROGRAM], {**settings, **where})


def srun(made: list[Node], settings: dict[str, str]) -> None:
    stand_in("srun", made, settings)


def mpirun(made: list[Node], settings: dict[str, str]) -> None:
    """The ranks meet in a file, so there is no store: the watchers meet in the folder of the dumps."""
    stand_in("mpirun", made, {**settings, "MEETING": f"file://{made[0].folder.parent / 'meeting'}"})


def spawn(made: list[Node], settings: dict[str, str]) -> None:
    made[0].start([PYTHON, *PROGRAM, "--spawn"], {**settings, "COMMLENS": "1"})


def torchrun_c10d(made: list[Node], settings: dict[str, str]) -> None:
    for node in made:
        options = [
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=job7",
            f"--rdzv-endpoint={made[0].address}:29511",
        ]
        node.start(
            [
                PYTHON,
                "-m",
                "commlens",
                "launch",
                *options,
                f"--local-addr={node.address}",
                *PROGRAM,
            ],
            settings,
        )


def pytorchjob(made: list[Node], settings: dict[str, str]) -> None:
    """A container for each node: its own pids, the launcher as pid 1, and the master by a service's
    name.
    """
    for node in made:
        variables = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(node.number),
            "PET_MASTER_ADDR": "train-master-0",
            "PET_MASTER_PORT": "23456",
            "PET_NPROC_PER_NODE": "1",
            "COMMLENS_JOB": "train",
        }
        container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        node.start(
            [*container, PYTHON, "-m", "commlens", "launch", *PROGRAM], {**settings, **variables}
        )


def words(node: Node) -> str:
    return " ".join(node.output.split())


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("start", "count"),
    [(srun, 2), long(mpirun, 2), long(spawn, 1), long(torchrun_c10d, 2), long(pytorchjob, 2)],
)
def test_a_late_and_a_killed_rank(tmp_path: Path, start: Start, count: int) -> None:
    with nodes(count, tmp_path) as made:
        if start is pytorchjob and not made[0].isolated:
            pytest.skip("needs network namespaces")
        name_hosts(made)
        try:
            start(
                made,
                {
                    "COMMLENS_STALL_TIMEOUT": "1.5",
                    "COMMLENS_DUMP_DIR": str(tmp_path / "dumps"),
                    "COMMLENS_ON_VERDICT": "cat >> verdicts",
                },
            )
            wait(made, 100)
            killed = "ank 1 died of SIGKILL"
            # with srun's store, the first node's watcher ends before it knows
            tellers = made[-1:] if start is srun else made
            end = time.monotonic() + 15
            # without a launcher of ours, the watchers outlive the ranks
            while time.monotonic() < end:
                if (
                    all(killed in words(node) for node in tellers)
                    and len(list((tmp_path / "dumps").iterdir())) == 1
                ):
                    break
                time.sleep(0.1)
        finally:
            for node in made:
                shutil.rmtree(f"/etc/netns/{node.namespace}", ignore_errors=True)
    first, last = words(made[0]), words(made[-1])
    assert "VERDICT" not in first.partition("trained")[0], "healthy: silent"
    assert (
        "VERDICT rank 1 never reached all_reduce #13 of the default group [0-1]; rank 0 waits"
        " for it." in first
    )
    assert "cluster_program.py:19 load_batch" in first
    assert count == 1 or "Rank 1 never reached all_reduce #13" in last
    assert all(killed in words(node) for node in tellers), (
        "rank 1's own node says so, and with a store that lives on, the first too"
    )
    for node in made:
        lines = (
            (node.folder / "verdicts").read_text().splitlines()
            if (node.folder / "verdicts").exists()
            else []
        )
        assert {rank for line in lines for rank in json.loads(line)["verdict"]["culprits"]} <= {
            1
        }, node.output
    assert len(list((tmp_path / "dumps").iterdir())) == 1
