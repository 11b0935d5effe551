"""Hand-written data parallel training: each step averages the gradients with one all_reduce."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch
import torch.distributed as dist

from commlens.scenarios import lab


def tokenize(step: int) -> None:
    if lab.strikes("holds-gil", step):
        ctypes.PyDLL(None).sleep(int(lab.STALL_S))  # fault: holds-gil


def check_loss(loss: torch.Tensor, step: int) -> None:
    if lab.strikes("dies-exception", step):
        raise ValueError(f"loss is not finite: {loss.item():.3f}")  # fault: dies-exception
    if lab.strikes("dies-exit", step):
        sys.exit(3)  # fault: dies-exit
    if lab.strikes("dies-hard-exit", step):
        os._exit(3)  # fault: dies-hard-exit
    if lab.strikes("dies-sigkill", step):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out  # fault: dies-sigkill
    if lab.strikes("dies-sigabrt", step):
        os.abort()  # as a failed assertion in C++ does  # fault: dies-sigabrt
    if lab.strikes("stopped", step):
        lab.when_ended(lab.STALL_S, f"kill -CONT {os.getpid()} 2>/dev/null")  # it does not stay stopped forever
        os.kill(os.getpid(), signal.SIGSTOP)  # fault: stopped


def average_gradients(model: torch.nn.Module) -> None:
    flat = lab.flat_gradients(model)
    dist.all_reduce(flat)  # fault: dies-exit, dies-hard-exit, dies-sigkill, dies-sigabrt
    lab.set_gradients(model, flat / dist.get_world_size())


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    check_loss(loss, step)
    average_gradients(model)
    optimizer.step()
    return loss.detach()


def main() -> None:
    rank, _ = lab.begin()
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        tokenize(step)
        loss = train_step(model, optimizer, x, y, step)
        lab.report(step, loss)
    lab.finish(model)
