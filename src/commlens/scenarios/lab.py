"""Functions that the scenario programs share: setup, batches, a small model, teardown. Imports torch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from commlens.scenarios.truth import FAULT_STEP, culprit_rank

STEPS = 12
"""Optimizer steps of every program. The fault is in step :data:`~commlens.scenarios.truth.FAULT_STEP`."""

GROUP_TIMEOUT = timedelta(seconds=25)
"""The timeout of every process group, so that a scenario ends by itself, with or without commlens."""

STALL_S = 60.0  # how long the culprit "hangs", in seconds


running_name = ""  # set by ``python -m commlens.scenarios NAME``


def running() -> str:
    """Return the name of the scenario that this process runs."""
    return running_name


def strikes(name: str, step: int) -> bool:
    """Return whether the fault ``name`` happens now: in its own scenario, on the culprit, in the fault's step."""
    return name == running() and step == FAULT_STEP and dist.get_rank() == culprit_rank(dist.get_world_size())


def begin(timeout: timedelta | None = None) -> tuple[int, int]:
    """Join the job. Returns rank and world size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timeout or GROUP_TIMEOUT)
    return dist.get_rank(), dist.get_world_size()


def small_model() -> torch.nn.Module:
    """Return a regression model of 1,409 parameters, the same on every rank."""
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Linear(24, 1))


def synthetic_batch(rank: int, step: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that depends only on rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 16, generator=generator)
    return x, torch.sin(x).sum(dim=1, keepdim=True)


def batches(rank: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Load each step's batch. Yields the step, the inputs and the targets."""
    for step in range(STEPS):
        pause(0.02)
        yield step, *synthetic_batch(rank, step)


def compute_gradients(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run forward and backward, and return the loss."""
    model.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def average_gradients(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average the gradients over a group, one parameter after the other."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def flat_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all gradients as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def set_gradients(model: torch.nn.Module, flat: torch.Tensor) -> None:
    """Reverse :func:`flat_gradients`."""
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()


def say(line: str) -> None:
    """Print a line in a single write, because the ranks share a terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(step: int, loss: torch.Tensor | float) -> None:
    """Print the loss, on rank 0."""
    if dist.get_rank() == 0:
        say(f"step {step} loss {float(loss):.4f}")


def pause(seconds: float) -> None:
    """Sleep, in place of real work."""
    time.sleep(seconds)


_HELPER = """
i=0
while kill -0 {pid} 2>/dev/null && [ $i -lt {rounds} ]; do sleep 0.2; i=$((i+1)); done
{then}
"""


def when_ended(seconds: float, then: str) -> None:
    """Start a process that runs ``then`` when this process has ended or the time is over."""
    script = _HELPER.format(pid=os.getpid(), rounds=int(seconds * 5), then=then)
    null = subprocess.DEVNULL
    subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True, stdin=null, stdout=null, stderr=null)


def finish(model: torch.nn.Module) -> None:
    """Print a checksum of the parameters and leave the job. Equal checksums mean bit-identical runs."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().view(-1).numpy().tobytes())
    say(f"rank {dist.get_rank()} ends with parameters {digest.hexdigest()[:16]}")
    # No rank leaves before all have arrived.
    dist.barrier()
    if torch.__version__.startswith("2.6."):
        pause(0.2)  # torch 2.6 joins gloo's threads while holding the GIL that they may be waiting for: torch's own deadlock
    dist.destroy_process_group()
