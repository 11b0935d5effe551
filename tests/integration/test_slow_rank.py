"""A rank that makes a running job slow is named with its line; the watcher's waiting times are
shortened.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

TRAIN = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def load_batch(rank):
    if rank == 1:
        time.sleep(0.02)
    return torch.ones(4, 8)

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(250):
        batch = load_batch(dist.get_rank())
        model(batch).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

main()
"""

LAUNCH = """
import sys
from commlens import commands
from commlens.speed import pace
from commlens.watch import slowness
from commlens.watch.alerts import metrics

pace.MIN_S = 2.0
slowness.INTERVAL_S = 0.4
slowness.CPU_SHARE = 0.1
metrics.WRITE_EVERY_S = 0.4
options = ["--metrics-file", "now.prom", "--on-verdict", "cp now.prom then.prom"]
sys.exit(commands.main(["launch", "--nproc-per-node", "3", *options, "train.py"]))
"""


def test_the_slow_rank_and_its_line_are_told_once(tmp_path: Path) -> None:
    """DDP waits for its collectives in C++, where nobody records it."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "launch.py").write_text(LAUNCH)
    done = subprocess.run(
        [sys.executable, "launch.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = re.sub(r"\s+", " ", done.stderr)
    assert said.count("makes the job slow: all others wait for") == 1, done.stderr
    assert "commlens: Rank 1 makes the job slow" in said
    line = TRAIN.splitlines().index("        time.sleep(0.02)") + 1
    assert f"train.py:{line} load_batch" in said or "py-spy record" in said
    pytest.importorskip("prometheus_client")
    told = (tmp_path / "then.prom").read_text()
    assert re.search(r'^commlens_steps_total\{job="[^"]+",rank="1"\} [1-9]', told, re.MULTILINE), (
        told
    )
    assert re.search(
        r'^commlens_waiting_ratio\{job="[^"]+",rank="0"\} 0\.[1-9]', told, re.MULTILINE
    ), "rank 0 waits"
    assert re.search(r'^commlens_group_bytes_per_second\{group="default group"', told, re.MULTILINE)
    assert not (tmp_path / "now.prom").exists(), "the job is over"
    assert not list(tmp_path.glob("commlens-dumps/*")), "nothing is wrong, so nothing is dumped"
