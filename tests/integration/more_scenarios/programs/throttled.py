"""Data parallel training in which a noisy neighbour leaves one rank a hundredth of a core."""

from __future__ import annotations

import torch

from commlens.scenarios import lab
from commlens.scenarios.programs import plain
from more_scenarios import throttle


def augment(x: torch.Tensor, step: int) -> torch.Tensor:
    """Do tens of milliseconds of real work on the CPU."""
    if lab.strikes("throttled", step):
        throttle.squeeze()  # a noisy neighbour: from here on this process gets one hundredth of a core  # fault: throttled
    mix = torch.eye(256) * 0.5
    noise = torch.ones(256, 256)
    for _ in range(80):  # fault: throttled
        noise = torch.tanh(noise @ mix)  # fault: throttled
    return x + noise.mean()  # fault: throttled


def main() -> None:
    rank, _ = lab.begin()
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        loss = plain.train_step(model, optimizer, augment(x, step), y, step)
        lab.report(step, loss)
    lab.finish(model)
