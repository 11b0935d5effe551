"""Data parallel training in which one rank has less data than the others."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from commlens.scenarios import lab


def end_of_epoch() -> None:
    dist.barrier()  # fault: uneven-then-barrier


def wait_for_results() -> None:
    """Poll for a file that the evaluation writes, as job scripts do."""
    results = Path(tempfile.gettempdir()) / "no-such-results.json"
    until = time.monotonic() + lab.STALL_S
    while not results.exists() and time.monotonic() < until:  # fault: uneven-then-idle
        time.sleep(1.0)  # fault: uneven-then-idle


def main() -> None:
    rank, _ = lab.begin()
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        if lab.strikes("uneven-then-barrier", step) or lab.strikes("uneven-then-idle", step):
            break  # the end of this rank's share
        loss = lab.compute_gradients(model, x, y)
        lab.average_gradients(model)
        optimizer.step()
        lab.report(step, loss)
    if lab.running() == "uneven-then-idle":
        wait_for_results()
    end_of_epoch()
    lab.finish(model)
