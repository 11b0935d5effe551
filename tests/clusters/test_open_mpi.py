"""Ranks that a real mpirun starts, in its own environment.

``make clusters`` runs these on a machine with Debian's openmpi-bin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusters.daemons import free_ports, wait_until, why_not

pytest.importorskip("torch")
_WHY_NOT = why_not(("mpirun",), "openmpi-bin")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]

# as in docs/clusters.md
ABORTS = """
import os, sys, time
import torch
torch.distributed.init_process_group(
    "gloo",
    init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
    world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
)
steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
for step in range(1000):
    torch.distributed.all_reduce(torch.ones(4))
    time.sleep(pause_s)
    if step == steps and torch.distributed.get_rank() == 3:
        os.abort()
"""


@pytest.mark.parametrize("at_once", [False, True])
def test_a_rank_aborts(tmp_path: Path, at_once: bool):
    (tmp_path / "train.py").write_text(ABORTS)
    out = tmp_path / "out"
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    with out.open("wb") as file:
        done = subprocess.run(
            [
                "mpirun", *as_root, "--oversubscribe", "-n", "4",
                "-x", "COMMLENS=1", "-x", f"COMMLENS_DUMP_DIR={tmp_path}/dumps",
                "-x", f"COMMLENS_BOX_DIR={tmp_path}/boxes", "-x", "OMP_NUM_THREADS=1",
                "-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_ports(1)[0]}",
                sys.executable, "train.py", *(["5", "0"] if at_once else ["300", "0.02"]),
            ],
            cwd=tmp_path,
            stdout=file,
            stderr=file,
            timeout=150,
            check=False,
        )  # fmt: skip
    assert done.returncode == 128 + 6
    # the watcher ends after mpirun
    wait_until(lambda: len(list(tmp_path.glob("dumps/*/index.html"))) == 1, "the dump")
    [file_of_verdict] = tmp_path.glob("dumps/*/verdict.json")
    verdict = json.loads(file_of_verdict.read_text())
    assert verdict["culprits"] == [3]
    assert verdict["summary"].startswith("rank 3 died of SIGABRT; ranks 0-2 were waiting for it in")
    assert verdict["action"]["do"] == "retry"
    assert at_once or "VERDICT rank 3 died of SIGABRT" in " ".join(out.read_text().split())
    diagnosed = subprocess.run(
        [sys.executable, "-m", "commlens", "diagnose", "--json", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "rank 3 died of SIGABRT" in json.loads(diagnosed.stdout)["summary"]
