"""A training loop with Lightning Fabric, which starts rank 1 itself. Rank 1 can be given a fault: ``fabric_train.py --fault skip``."""

import argparse

import torch
from faults import NAMES, leaves_out_the_collective, misbehave
from lightning.fabric import Fabric


def train(fault: str) -> None:
    """Train a small model for ten steps."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
    mean = torch.zeros(1)
    for step, (inputs, targets) in enumerate(fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=4))):
        misbehave(fault, fabric.global_rank, step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not leaves_out_the_collective(fault, fabric.global_rank, step):
            mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"loss {mean.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    train(parser.parse_args().fault)
