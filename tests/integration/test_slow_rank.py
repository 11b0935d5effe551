"""A rank that makes a running job slow is named with its line; the watcher's waiting times are
shortened.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from harness import Harness

from commlens.config import Settings
from commlens.processes import pyspy
from commlens.speed import pace
from commlens.watch import slowness
from commlens.watch.alerts import metrics

sys.path.append(str(Path(__file__).parents[1]))

import nccl_like

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)  # the first test on a device compiles the backend

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


ON_DEVICE = """
import nccl_like
import torch
import torch.distributed as dist

def load_batch(rank):
    if rank == 1 and {host}:
        time.sleep(0.01)

def main():
    dist.init_process_group("nccl")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    gradients = [torch.ones(256) for _ in range(4)]
    for _ in range(400):
        load_batch(dist.get_rank())
        nccl_like.launch_kernel(0.02 if {host} or dist.get_rank() != 1 else 0.03)
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()
        nccl_like.synchronize()
        optimizer.step()
    dist.destroy_process_group()

import time
main()
"""


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (False, "so its device takes longer"),
        pytest.param(True, "load_batch", marks=pytest.mark.long),
    ],
)
def test_a_slow_device_and_a_slow_host_are_told_apart(
    jobs: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: bool, why: str
) -> None:
    """No host waits in a collective: the durations that torch's recorder has measured tell."""
    if why_not := nccl_like.why_not():
        pytest.skip(why_not)
    look_often(monkeypatch)
    environment = {
        "NCCL_LIKE": "1",
        nccl_like.LIBRARY: str(nccl_like.build()),
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "TORCH_FR_BUFFER_SIZE": "500",
    }
    result = jobs.run_program(
        ON_DEVICE.format(host=host),
        3,
        tmp_path,
        settings=Settings(timing=True),
        environment=environment,
    )
    assert set(result.exits.values()) == {0}, result
    said = " ".join(" ".join(result.lines).split())
    assert "Rank 1 makes the job slow: all others wait for" in said, result
    if pyspy.find() is None:
        why = "whether the host or the device is late is not known"
    assert why.lower() in said.lower(), result
