"""A pipeline: each rank is a stage; activations are sent forward, gradients backward, two microbatches per step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commlens.scenarios import lab

MICROBATCHES = 2
WIDTH = 16


def load_microbatch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    lab.pause(0.01)
    return lab.synthetic_batch(index, step, size=8)


def receive_activation(rank: int) -> torch.Tensor:
    activation = torch.empty(8, WIDTH)
    dist.recv(activation, rank - 1)  # fault: pipeline-lost-send
    return activation.requires_grad_()


def send_gradient(gradient: torch.Tensor | None, rank: int, step: int, index: int) -> None:
    assert gradient is not None
    if index == MICROBATCHES - 1 and lab.strikes("pipeline-lost-send", step):
        return
    dist.send(gradient, rank - 1)  # fault: pipeline-lost-send


def train_step(stage: torch.nn.Module, rank: int, world_size: int, step: int) -> torch.Tensor:
    """Run all microbatches forward, then all backward."""
    last = rank == world_size - 1
    inputs, outputs = [], []
    total = torch.zeros(())
    for index in range(MICROBATCHES):
        x, y = load_microbatch(step, index)
        activation = x.requires_grad_() if rank == 0 else receive_activation(rank)
        output = stage(activation)
        if last:
            output = torch.nn.functional.mse_loss(output.sum(dim=1, keepdim=True), y)
            total += output.detach()
        else:
            dist.send(output.detach(), rank + 1)
        inputs.append(activation)
        outputs.append(output)
    for index in range(MICROBATCHES):
        if last:
            outputs[index].backward()
        else:
            gradient = torch.empty_like(outputs[index])
            dist.recv(gradient, rank + 1)
            outputs[index].backward(gradient)
        if rank > 0:
            send_gradient(inputs[index].grad, rank, step, index)
    return total


def main() -> None:
    rank, world_size = lab.begin()
    stage = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for step in range(lab.STEPS):
        optimizer.zero_grad()
        loss = train_step(stage, rank, world_size, step)
        optimizer.step()
        if rank == world_size - 1:
            lab.say(f"step {step} loss {float(loss):.4f}")
    lab.finish(stage)
