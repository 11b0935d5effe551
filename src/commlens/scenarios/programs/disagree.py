"""Hand-written data parallel training in which one rank once issues a different collective, or
leaves one out. The comment on a line names the faults that stop ranks at that line.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from commlens.scenarios import lab


def average_gradients(model: torch.nn.Module, step: int) -> None:
    flat = lab.flat_gradients(model)
    if lab.strikes("skip-then-other", step) or lab.strikes("skip-then-same", step):
        return  # "this batch was bad, skip its gradients"
    if lab.strikes("mismatch-dtype", step):
        flat = flat.to(torch.bfloat16)
    if lab.strikes("mismatch-op", step):
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat)  # fault: mismatch-op
        flat = torch.stack(parts).sum(dim=0)
    elif lab.strikes("mismatch-reduce-op", step):
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)  # fault: mismatch-reduce-op
    else:
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)  # fault: mismatch-dtype, skip-then-same
    lab.set_gradients(model, flat / dist.get_world_size())


def gather_losses(loss: torch.Tensor, step: int) -> torch.Tensor:
    losses = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.view(1))  # fault: skip-then-other
    return torch.cat(losses).mean()


def gather_predictions(predictions: torch.Tensor, step: int) -> None:
    if lab.strikes("mismatch-size", step):
        predictions = predictions[:-8]  # the last batch of this shard is shorter
    everyone = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, predictions)  # fault: mismatch-size


def agree_on_scale(step: int) -> float:
    scale = torch.tensor([1.0])
    source = 2 if lab.strikes("mismatch-root", step) else 0  # not every wrong root hangs: gloo sends along a tree
    dist.broadcast(scale, src=source)  # fault: mismatch-root
    return float(scale)


def save_results() -> None:
    dist.barrier()  # fault: skip-then-same


def main() -> None:
    rank, _ = lab.begin()
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, y in lab.batches(rank):
        optimizer.zero_grad()
        predictions = model(x)
        loss = torch.nn.functional.mse_loss(predictions, y)
        (loss * agree_on_scale(step) if lab.running() == "mismatch-root" else loss).backward()
        average_gradients(model, step)
        optimizer.step()
        shown = loss.detach()
        if lab.running() == "skip-then-other":
            shown = gather_losses(shown, step)
        if lab.running() == "mismatch-size":
            gather_predictions(predictions.detach(), step)
        lab.report(step, shown)
    if lab.running() == "skip-then-same":
        save_results()
    lab.finish(model)
