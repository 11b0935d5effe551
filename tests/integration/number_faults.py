"""Training jobs in which the tensors of one rank part from the others': ``python number_faults.py
OUT ddp-bit:4 hsdp-lr:4 ...``. With ``@`` behind the size, the ranks meet in the job's store, as on
several nodes.

The fault strikes the last rank before optimizer step ``AT``, unless the program has it from the
beginning. Rank 0 writes the verdicts that it logs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from listening import listen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from verify_forked import Job, Jobs, init, prepare, write

AT = 7
AT_END = ("late", "loaded")  # faults after the last step that is checked
STEPS = 10
EVERY = 2
WIDTH = 16


class Block(nn.Module):
    """A block of a transformer, without attention."""

    def __init__(self, *, swapped: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        for name in ("right", "left") if swapped else ("left", "right"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.right(torch.relu(self.left(self.dropout(self.norm(x)))))


class Backwards(nn.Sequential):
    """Modules of which the last one runs first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in reversed(self):
            x = module(x)
        return x


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def make(how: str, fault: str, size: int, *, is_odd: bool) -> nn.Module:
    """The model, wrapped in this way."""
    torch.manual_seed(0)
    dropout = 0.5 if fault == "seed" else 0.0
    swapped = fault == "order" and is_odd
    kind = Backwards if fault == "calls" and is_odd else nn.Sequential
    model = kind(*(Block(swapped=swapped, dropout=dropout) for _ in range(2)))
    if how == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    if how in ("fsdp", "hsdp", "2d"):
        shape, names = ((size,), ("dp",)) if how == "fsdp" else ((size // 2, 2), ("dp", "inner"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if how == "2d":
            tensor_parallel(model, mesh["inner"])
            mesh = mesh["dp"]
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if how == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    return model


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    plan = {"left": ColwiseParallel(), "right": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, plan)


def batch(how: str, fault: str, step: int, rank: int, *, is_odd: bool) -> torch.Tensor:
    """What a rank reads."""
    part = {"tp": 0, "2d": rank // 2}.get(how, rank)
    if fault == "same-batch" and part == 1:
        part = 0
    values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + part))
    if fault in ("nan", "nan-first") and step == AT and is_odd:
        values[3, 3] = float("nan")
    return values


def strike(fault: str, block: Any, optimizer: torch.optim.Optimizer) -> None:
    """Damage something of this rank."""
    weight = block.norm.weight
    if fault in ("bit", "late"):
        local(weight.data).view(torch.int32)[0] ^= 1 << 12
    elif fault == "state":
        local(optimizer.state[weight]["exp_avg"]).view(torch.int32)[0] ^= 1 << 20
    elif fault == "drift":
        weight.data.mul_(1 + 2.0**-23)
    elif fault == "gradient":
        local(weight.grad).view(torch.int32)[0] ^= 1 << 15
    elif fault == "reduction":
        for parameter in block.parameters():
            local(parameter.grad).mul_(1.5)
    elif fault == "lr":
        optimizer.param_groups[0]["lr"] *= 2
    elif fault == "resume":
        for state in optimizer.state.values():
            local(state["exp_avg"]).zero_()


def train(rank: int, size: int, how: str, fault: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train, and return the model and its optimizer."""
    is_odd = rank == size - 1
    model = make(how, fault, size, is_odd=is_odd)
    blocks = list(getattr(model, "module", model))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(is_odd if how == "tp" and fault == "seed" else 0 if how == "tp" else rank)
    at = STEPS + 1 if fault in AT_END else AT
    for step in range(1, max(STEPS, at) + 1):
        optimizer.zero_grad()
        model(batch(how, fault, step, rank, is_odd=is_odd)).square().mean().backward()
        if how == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        for block in blocks:
            if not (fault == "buffer" and is_odd and step >= AT):
                block.seen += step
        if is_odd and (step == at or (fault == "drift" and step > AT)):
            strike(fault, blocks[1], optimizer)
        optimizer.step()
    if fault == "loaded" and is_odd:
        model.load_state_dict({name: 2 * each for name, each in model.state_dict().items()})
    return model, optimizer


def record_verdicts() -> Callable[[], dict[str, Any]]:
    """Listen to what this rank logs from now on. Return a function that returns it."""
    heard = listen()
    return lambda: {
        "verdicts": [str(each.to_json(), "utf-8") for each in heard.verdicts],
        "lines": heard.lines,
        "last": heard.last,
    }


def run(rank: int, size: int, result: Path, case: str) -> None:
    """Train, and write what this rank logs."""
    from commlens.numbers import checks

    record = record_verdicts()
    init(result.parent, rank, size, 30.0)
    how, _, fault = case.partition("-")
    model, optimizer = train(rank, size, how, fault)
    bits = [local(each).detach().view(torch.int32).tolist() for each in model.parameters()]
    dist.destroy_process_group()
    checks.finish()
    del optimizer
    write(result, {**record(), "bits": bits})


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    import commlens.numbers.sampling  # noqa: F401 - once, before the forks

    jobs = []
    for which in sys.argv[2:]:
        case, _, size = which.rstrip("@").partition(":")

        def body(rank: int, world: int, result: Path, case: str = case) -> None:
            run(rank, world, result, case)

        how = f"every {EVERY} steps" + ",nan" * ("-nan-first" in case)
        settings = {"debug": False, "check_numbers": how, "engine": "python"}
        if case.endswith("-unchecked"):
            settings["check_numbers"] = False
        nodes = 2 if which.endswith("@") else 1
        jobs.append(Job(which, int(size), body, settings, timeout_s=240.0, nodes=nodes))
    prepare()
    Jobs(out).run(jobs, at_once=1)


if __name__ == "__main__":
    main()
