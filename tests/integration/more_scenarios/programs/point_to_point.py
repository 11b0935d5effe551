"""Decentralised training: ranks exchange values with their neighbours by send and receive."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commlens.scenarios import lab
from commlens.scenarios.truth import culprit_rank


def swap_with_partner(value: torch.Tensor, rank: int, world_size: int, step: int) -> torch.Tensor:
    """Exchange values in pairs: one rank sends first, the other receives first."""
    partner = rank ^ 1
    incoming = torch.empty_like(value)
    sends_first = (rank - culprit_rank(world_size)) % 2 == 0
    if lab.strikes("both-recv", step):
        sends_first = False
    if sends_first:
        dist.send(value, partner)
        dist.recv(incoming, partner)
    else:
        dist.recv(incoming, partner)  # fault: both-recv
        dist.send(value, partner)
    if lab.strikes("recv-without-send", step):
        dist.recv(incoming, partner)  # no rank sends this one  # fault: recv-without-send
    return (value + incoming) / 2


def halo_exchange(edge: torch.Tensor, rank: int, world_size: int, step: int) -> torch.Tensor:
    """Send to the right and receive from the left, in one batch."""
    incoming = torch.empty_like(edge)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    ops = [dist.P2POp(dist.isend, edge, right), dist.P2POp(dist.irecv, incoming, left)]
    if lab.strikes("batched-p2p-missing", step):
        ops = ops[1:]
    for work in dist.batch_isend_irecv(ops):  # fault: batched-p2p-missing
        work.wait()
    return (edge + incoming) / 2


def average_gradients(model: torch.nn.Module) -> None:
    flat = lab.flat_gradients(model)
    dist.all_reduce(flat)  # fault: batched-p2p-missing
    lab.set_gradients(model, flat / dist.get_world_size())


def main() -> None:
    rank, world_size = lab.begin()
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        loss = lab.compute_gradients(model, x, y)
        shown = loss.detach().clone()
        if lab.running() in ("batched-p2p-missing", "healthy-p2p"):
            shown = halo_exchange(shown, rank, world_size, step)
        if lab.running() != "batched-p2p-missing":
            shown = swap_with_partner(shown, rank, world_size, step)
        average_gradients(model)
        optimizer.step()
        lab.report(step, shown)
    lab.finish(model)
