"""A function for ``on_ranks``: a job in DDP of which every op is compared."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from listening import listen
from torch import nn
from torch.nn.parallel import DistributedDataParallel

AT = 3
ODD = 2


def train(fault: str) -> dict[str, Any]:
    """Train, and return what was found."""
    from commlens.model.number_checks import parse_number_checks
    from commlens.numbers import checks, sampling

    heard = listen()
    if fault != "unchecked":
        sampling.start(parse_number_checks("every-op"))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    weight = model.module[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    for step in range(1, AT + 2):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        if (rank, step) == (ODD, AT):
            if fault == "gradient":
                weight.grad.mul_(2)
            elif fault == "lr":
                optimizer.param_groups[0]["lr"] = 0.2
            elif fault == "outside":
                weight.detach().numpy()[1, 1] = 7.0
            elif fault == "log":
                loss.detach().mul(2)
        optimizer.step()
    checks.finish()
    found = [
        (each.departure, each.culprits, each.step, [side.op for side in each.ops])
        for each in (verdict.cause for verdict in heard.verdicts)
    ]
    return {"found": found, "lines": heard.lines, "weight": weight.detach().clone()}
