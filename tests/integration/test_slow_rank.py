"""A rank that makes a running job slow is named with its line; the watcher's waiting times are
shortened.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import Harness

from commlens.config import Settings
from commlens.speed import pace
from commlens.watch import slowness
from commlens.watch.alerts import metrics

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
    for _ in range(500):
        batch = load_batch(dist.get_rank())
        model(batch).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

main()
"""


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the watcher look for a slow rank every 0.4 s."""
    monkeypatch.setattr(pace, "MIN_S", 2.0)
    monkeypatch.setattr(slowness, "INTERVAL_S", 0.4)
    monkeypatch.setattr(slowness, "CPU_SHARE", 0.1)


def test_the_slow_rank_and_its_line_are_told_once(
    jobs: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP waits for its collectives in C++, where nobody records it."""
    look_often(monkeypatch)
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.4)
    now, then = tmp_path / "now.prom", tmp_path / "then.prom"
    settings = Settings(metrics_file=str(now), on_verdict=f"cp {now} {then}")
    result = jobs.run_program(TRAIN, 3, tmp_path, settings=settings)
    assert set(result.exits.values()) == {0}, result
    said = " ".join(" ".join(result.lines).split())
    assert said.count("makes the job slow: all others wait for") == 1, result
    assert "Rank 1 makes the job slow" in said
    line = TRAIN.splitlines().index("        time.sleep(0.02)") + 1
    assert f"train.py:{line} load_batch" in said or "py-spy record" in said
    pytest.importorskip("prometheus_client")
    told = then.read_text()
    assert re.search(
        r'^commlens_steps_total\{job_name="[^"]+",rank="1"\} [1-9]', told, re.MULTILINE
    ), told
    assert re.search(
        r'^commlens_waiting_ratio\{job_name="[^"]+",rank="0"\} 0\.[1-9]', told, re.MULTILINE
    ), "rank 0 waits"
    assert re.search(r'^commlens_group_bytes_per_second\{group="default group"', told, re.MULTILINE)
    assert not now.exists(), "the job is over"
    assert not list(tmp_path.glob("dumps/*")), "nothing is wrong, so nothing is dumped"
