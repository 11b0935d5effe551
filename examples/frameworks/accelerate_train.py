"""A training loop with Accelerate. Rank 1 can be given a fault: ``accelerate_train.py --fault skip``."""

import argparse

import torch
from accelerate import Accelerator
from faults import NAMES, leaves_out_the_collective, misbehave


def train(fault: str) -> float:
    """Train a small model for ten steps, and return the last loss, averaged over the ranks."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    data = torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    mean = 0.0
    for step, (inputs, targets) in enumerate(loader):
        misbehave(fault, accelerator.process_index, step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not leaves_out_the_collective(fault, accelerator.process_index, step):
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
    accelerator.print(f"loss {mean:.6f}")
    accelerator.end_training()
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    train(parser.parse_args().fault)
