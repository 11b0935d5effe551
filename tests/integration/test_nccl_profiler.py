"""A job on gloo in which each rank also has a communicator of NCCL past torch, which a driver plays
to commlens's plugin: the watcher tells its hang by rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nccl_player
import pytest
from zygote_client import Zygote

from commlens.dumps.read import read_evidence
from commlens.native import nccl_profiler

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(nccl_profiler.library() is None, reason="the plugin was not built here"),
    pytest.mark.timeout(180),
]
PROGRAM = """
import os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[1])
from nccl_player import Player



def wait_for_batch():
    time.sleep(1000)


def synchronize():
    while True:
        pass


dist.init_process_group("gloo")
rank = dist.get_rank()
play = Player(Path(os.environ["NCCL_PROFILER_PLUGIN"]), Path(sys.argv[2]))
comm = play.communicator(0xAB12, None, dist.get_world_size(), rank)
dist.all_reduce(torch.ones(4))
comm.run(6)
if rank == 1:
    wait_for_batch()
comm.start(comm.launch(comm.call()))
synchronize()
"""


def test_a_hang_past_torch_is_told_by_rank(zygote: Zygote, tmp_path: Path):
    player = nccl_player.build(tmp_path, nccl_player.PLAYER)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "commlens", "launch", "--nproc-per-node", "2"]
    command += ["--nccl-profiler", "kernels", "--stall-timeout", "5", "--abort-on", "stall"]
    command += ["--dump-dir", str(tmp_path / "dumps"), str(program)]
    command += [str(Path(nccl_player.__file__).parent), str(player)]
    environ = {
        **os.environ,
        "COMMLENS_BOX_DIR": str(tmp_path / "boxes"),
        "OMP_NUM_THREADS": "1",
    }
    ended = zygote.call(command, timeout_s=150, env=environ)
    assert "rank 1 never reached all_reduce #7 of group NCCL communicator ab12" in " ".join(
        ended.stderr.split()
    ), ended.stderr
    logs = read_evidence(tmp_path / "dumps").logs
    assert [log.nccl.communicators[0].collectives for log in logs if log.nccl] == [7, 6]
    (verdict,) = (tmp_path / "dumps").glob("*/verdict.json")
    assert json.loads(verdict.read_text())["culprits"] == [1]
    assert not list((tmp_path / "boxes").rglob("nccl.*")), "they go with the boxes"
