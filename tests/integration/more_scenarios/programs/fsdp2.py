"""fully_shard (FSDP2): parameters are gathered block by block, in the order in which forward runs the blocks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from commlens.scenarios import lab


def block(hidden: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 16)
    )


class Model(torch.nn.Module):
    """Two blocks of different width and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = block(64)
        self.narrow = block(32)
        self.head = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, swapped: bool) -> torch.Tensor:
        if swapped:  # "stochastic order", drawn without a common seed
            x = x + self.narrow(x)  # fault: fsdp2-forward-order
            x = x + self.wide(x)
        else:
            x = x + self.wide(x)
            x = x + self.narrow(x)
        return self.head(x)


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    step: int,
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(
        model(x, swapped=lab.strikes("fsdp2-forward-order", step)), y
    )
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    rank, world_size = lab.begin()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    model = Model()
    for part in (model.wide, model.narrow, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        loss = train_step(model, optimizer, x, y, step)
        lab.report(step, loss)
    lab.finish(model)
