"""What the scenario programs share: a start, a batch, a small model, a last line. Imports torch."""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from commlens.scenarios.truth import FAULT_STEP, culprit_rank

STEPS = 12
"""Optimizer steps of every program. The fault sits in step :data:`~commlens.scenarios.truth.FAULT_STEP`."""

GROUP_TIMEOUT = timedelta(seconds=25)
"""Of every process group: a scenario ends by itself, with or without commlens."""

STALL_S = 60.0
"""How long a rank that "hangs" does so."""


running_name = ""
"""Set by ``python -m commlens.scenarios NAME``."""


def running() -> str:
    """The name of the scenario that this process runs."""
    return running_name


def strikes(name: str, step: int) -> bool:
    """Whether the fault ``name`` happens here and now: in its own scenario, on the culprit, in the fault's step."""
    return name == running() and step == FAULT_STEP and dist.get_rank() == culprit_rank(dist.get_world_size())


def begin(timeout: timedelta = GROUP_TIMEOUT) -> tuple[int, int]:
    """Join the job; returns rank and world size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


def small_model() -> torch.nn.Module:
    """A regression model of 1,409 parameters, the same on every rank."""
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Linear(24, 1))


def synthetic_batch(rank: int, step: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that depends on nothing but rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 16, generator=generator)
    return x, torch.sin(x).sum(dim=1, keepdim=True)


def say(line: str) -> None:
    """One line in one write: the ranks share a terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(step: int, loss: torch.Tensor | float) -> None:
    """Rank 0 says how it goes."""
    if dist.get_rank() == 0:
        say(f"step {step} loss {float(loss):.4f}")


def pause(seconds: float) -> None:
    """Stand for work whose length does not matter here."""
    time.sleep(seconds)


def finish(model: torch.nn.Module) -> None:
    """Leave the job, saying in one line what was learnt: equal lines mean bit-identical runs."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().view(-1).numpy().tobytes())
    say(f"rank {dist.get_rank()} ends with parameters {digest.hexdigest()[:16]}")
    # Nobody leaves before all have come.
    dist.barrier()
    if torch.__version__.startswith("2.6."):
        pause(0.2)  # it joins gloo's threads with the GIL held, for which they may still be waiting: a deadlock of its own
    dist.destroy_process_group()
