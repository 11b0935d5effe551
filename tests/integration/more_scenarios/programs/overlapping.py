"""Training over overlapping process groups, in a legal order or in one that deadlocks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commlens.scenarios import lab
from commlens.scenarios.truth import culprit_rank


def exchange(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(value, group=group)  # fault: swap-three-groups


def halves(rank: int, world_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's group of even or odd ranks, and its group of the first or second half."""
    chosen: list[dist.ProcessGroup] = []
    for division in (
        [[r for r in range(world_size) if r % 2 == k] for k in (0, 1)],
        [range(world_size // 2), range(world_size // 2, world_size)],
    ):
        description = "stride" if not chosen else "block"
        groups = [
            (ranks, dist.new_group(list(ranks), group_desc=description)) for ranks in division
        ]
        chosen += [group for ranks, group in groups if rank in ranks]  # exactly one
    return chosen[0], chosen[1]


def asynchronously(
    rank: int, value: torch.Tensor, first: dist.ProcessGroup, second: dist.ProcessGroup
) -> torch.Tensor:
    """Issue and wait in different orders on each rank. Legal across groups, because no rank waits before all are issued."""
    a, b, c = value.clone(), value.clone() * 2, value.clone() * 3
    order = (
        [(a, first), (b, second), (c, first)]
        if rank % 2 == 0
        else [(b, second), (a, first), (c, first)]
    )
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in order]
    for work in works if rank % 3 == 0 else reversed(works):
        assert work is not None
        work.wait()
    return a + b + c


def main() -> None:
    rank, world_size = lab.begin()
    model = lab.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    everyone = list(range(world_size))
    name = lab.running()
    gradients = dist.new_group(everyone, group_desc="gradients")
    statistics = dist.new_group(everyone, group_desc="statistics")
    stride, block = (
        halves(rank, world_size) if name == "healthy-subgroups" else (gradients, statistics)
    )
    edges: list[tuple[list[int], dist.ProcessGroup]] = []
    if name == "swap-three-groups":
        # Each rank is in two edges; the culprit a takes them in the other order, which closes a cycle of three.
        a = culprit_rank(world_size)
        b, c = a - 1, a + 1
        edges = [
            (pair, dist.new_group(pair, group_desc=f"edge-{pair[0]}-{pair[1]}"))
            for pair in ([b, a], [b, c], [a, c])
        ]
    for step, x, y in lab.batches(rank):
        loss = lab.compute_gradients(model, x, y)
        shown = loss.detach().clone()
        if name == "healthy-subgroups":
            lab.average_gradients(model, stride)
            lab.average_gradients(model, block)
        elif name == "healthy-async":
            shown = asynchronously(rank, shown, gradients, statistics)
            lab.average_gradients(model, gradients)
        else:
            own_edges = [group for pair, group in edges if rank in pair]
            for group in reversed(own_edges) if lab.strikes(name, step) else own_edges:
                exchange(shown, group)
            lab.average_gradients(model, gradients)
        optimizer.step()
        lab.report(step, shown)
    lab.finish(model)
