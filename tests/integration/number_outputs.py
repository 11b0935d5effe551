"""A function for ``on_ranks``: a program that issues its collectives in Python, and has the
outputs compared at every second step.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from listening import listen
from torch import nn

AT = 4
TIMEOUT_S = 20.0
ODD = 2


def train(fault: str) -> dict[str, Any]:
    """Train, and return what was logged, what was compared last, and the parameters."""
    from commlens.model.number_checks import NumberChecks
    from commlens.numbers import checks, sampling
    from commlens.numbers.outputs import OutputWatch

    heard = listen()
    names: list[list[str]] = []

    class Watch(OutputWatch):
        def take(self) -> Any:
            outputs = super().take()
            names.append([each[1] for output in outputs for each in output._about])
            return outputs

    if fault != "unchecked":
        sampling.OutputWatch = Watch  # type: ignore[misc]
        sampling.start(NumberChecks(every=2))
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    for step in range(1, 7):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        for parameter in model.parameters():
            average(parameter.grad, fault if (rank, step) == (ODD, AT) else "")
        gathered = [torch.empty(3) for _ in range(size)]
        dist.all_gather(gathered, torch.full((3,), float(rank)))
        sent = torch.full((5,), float(rank) + step)
        dist.broadcast(sent, 0)
        total = functional.all_reduce(sent, "sum", dist.group.WORLD)
        total.add_(rank)  # its own from here on
        dist.reduce_scatter(torch.empty(1), list(torch.ones(size, 1)))
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=pair)
        optimizer.step()
    checks.finish()
    cause = heard.verdicts[0].cause if heard.verdicts else None
    return {
        "lines": heard.lines,
        "names": names,
        "why": cause and (cause.why, cause.departure, cause.culprits, cause.step, cause.equal_at),
        "tensor": cause and cause.tensors[0].name,
        "source": cause and cause.tensors[0].source,
        "parameters": [each.detach().clone() for each in model.parameters()],
    }


def average(gradient: Any, fault: str) -> None:
    """Reduce a gradient. With a fault, something changes the output before the program waits."""
    work: Any = dist.all_reduce(gradient, async_op=True)
    if fault and gradient.dim() == 1:
        until = time.monotonic() + TIMEOUT_S
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        if fault == "damaged":
            gradient.data.mul_(3)  # unseen by torch, as when another program writes
        elif fault == "own":
            gradient.mul_(3)
    work.wait()
