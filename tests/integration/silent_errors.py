"""Training programs with the silent errors that the literature reports, as far as CPU ranks can
have them, with a check after each ``EVERY`` steps: ``python silent_errors.py OUT EVERY
moved-after-ddp:4 ...``.

Sources: TrainCheck (OSDI '25) and its workloads, TTrace (arXiv 2506.09280), and the issues of
Megatron-LM that were found with such tools. Each error is there from the first step on, as it was
reported, unless its name ends with ``-later``: then it begins at step ``AT``.

Megatron's layers are rebuilt with plain tensors, and once more with torch's DTensor. With
``-in-megatron``, commlens finds their groups where Megatron keeps them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from number_faults import WIDTH, Block, record_verdicts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from verify_forked import Job, Jobs, init, prepare, write

import commlens

AT: Final = 6
LENGTH: Final = 8


class Case:
    """What a program needs to know."""

    def __init__(self, size: int, steps: int, *, later: bool, in_megatron: bool) -> None:
        self.rank = dist.get_rank()
        self.size = size
        self.steps = steps
        self.later = later
        self.in_megatron = in_megatron
        self.is_odd = self.rank == size - 1

    def errs(self, step: int) -> bool:
        """Whether the error is there in this step."""
        return not self.later or step >= AT

    def each_step(self, optimizer: torch.optim.Optimizer, run: Callable[[int], Any]) -> None:
        """Train."""
        for step in range(1, self.steps + 1):
            optimizer.zero_grad()
            run(step)
            optimizer.step()


def batch(step: int, part: int) -> torch.Tensor:
    """What a rank reads."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(LENGTH, 4, WIDTH, generator=generator)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(2)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def reduce_gradients(model: nn.Module, group: Any = None, leave_out: Any = ()) -> None:
    """Average gradients over a group."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not any(each in name for each in leave_out):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


# --- data parallel


def moved_after_ddp(case: Case) -> None:
    """A model that was moved after DDP had wrapped it loses DDP's hooks (pytorch#104336)."""
    model = DistributedDataParallel(blocks())

    def train(step: int) -> None:
        if step == (AT if case.later else 1):
            model.double().float()  # as .cpu().cuda() does
        model(batch(step, case.rank)).square().mean().backward()

    case.each_step(adam(model), train)


def wrapper_bypassed(case: Case) -> None:
    """The model inside of DDP is called, not DDP (OpenTSLM#49; "DDP out of sync" in TrainCheck)."""
    model = DistributedDataParallel(blocks())

    def train(step: int) -> None:
        forward = model.module if case.errs(step) else model
        forward(batch(step, case.rank)).square().mean().backward()

    case.each_step(adam(model), train)


def message_lost(case: Case) -> None:
    """The hardware loses a message: a result is zero on one rank (pytorch#84803, pytorch#96600,
    Baichuan2#86).
    """
    model = DistributedDataParallel(blocks())

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
        def finish(future: Any) -> torch.Tensor:
            found = future.value()[0] / case.size
            return torch.zeros_like(found) if step_now[0] == AT and case.is_odd else found

        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(finish)

    step_now = [0]
    model.register_comm_hook(None, reduce)

    def train(step: int) -> None:
        step_now[0] = step
        model(batch(step, case.rank)).square().mean().backward()

    case.each_step(adam(model), train)


def unfrozen_after_ddp(case: Case) -> None:
    """A layer is frozen when DDP wraps the model, and trained later on: DDP ignores it."""
    net = blocks()
    net[0].left.requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = adam(model)

    def train(step: int) -> None:
        if step == (AT if case.later else 1):
            net[0].left.requires_grad_(True)
        model(batch(step, case.rank)).square().mean().backward()

    case.each_step(optimizer, train)


def shared_data(case: Case) -> None:
    """All ranks read the same batches, because the data are not divided among them."""
    model = DistributedDataParallel(blocks())
    case.each_step(adam(model), lambda step: model(batch(step, 0)).square().mean().backward())


def parameter_left_out(case: Case) -> None:
    """Parameters that fill a bucket exactly are not reduced (DeepSpeed#4321). At the end, the
    program asks for a check.
    """
    net = blocks()

    def train(step: int) -> None:
        net(batch(step, case.rank)).square().mean().backward()
        reduce_gradients(net, leave_out=["1.left.weight"] if case.errs(step) else [])

    case.each_step(adam(net), train)
    commlens.check_numbers(net, group=dist.group.WORLD)


def other_scale(case: Case) -> None:
    """The loss is divided twice by the number of ranks: the same on all of them (TTrace)."""
    model = DistributedDataParallel(blocks())

    def train(step: int) -> None:
        (model(batch(step, case.rank)).square().mean() / case.size).backward()

    case.each_step(adam(model), train)


def local_token_count(case: Case) -> None:
    """Each rank divides by its own number of tokens, not by that of all (Megatron-LM#7452, 3)."""
    model = DistributedDataParallel(blocks())

    def train(step: int) -> None:
        x = batch(step, case.rank)[:, : 1 + case.rank % 4]
        model(x).square().mean().backward()

    case.each_step(adam(model), train)


def optimizer_before_fsdp(case: Case) -> None:
    """The optimizer holds the parameters from before FSDP, which no step changes (accelerate#2665)."""
    net = blocks()
    optimizer = adam(net)
    mesh = init_device_mesh("cpu", (case.size,))
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    case.each_step(optimizer, lambda step: net(batch(step, case.rank)).square().mean().backward())


def stale_gather(case: Case) -> None:
    """An optimizer that is sharded by hand: one rank does not copy what it gathers (parameters that
    are not updated, in TTrace; Megatron-LM#950). At the end, the program asks for a check.
    """
    net = blocks()
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    share = len(flat) // case.size
    mine = slice(case.rank * share, (case.rank + 1) * share)
    master = nn.Parameter(flat[mine].clone())
    optimizer = torch.optim.Adam([master], lr=1e-3)
    for step in range(1, case.steps + 1):
        net.zero_grad()
        net(batch(step, case.rank)).square().mean().backward()
        gradient = nn.utils.parameters_to_vector([each.grad for each in net.parameters()])
        dist.all_reduce(gradient)
        master.grad = gradient[mine] / case.size
        optimizer.step()
        parts = [torch.empty(share) for _ in range(case.size)]
        dist.all_gather(parts, master.detach())
        if not (case.errs(step) and case.is_odd):
            nn.utils.vector_to_parameters(torch.cat(parts), net.parameters())
    net.zero_grad()  # these were never reduced
    commlens.check_numbers(net, group=dist.group.WORLD)


# --- tensor parallel, with plain tensors as in Megatron


class _Gather(torch.autograd.Function):
    """Gathers sequences, and scatters the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _scatter_sum(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Scatters a sum over the sequence, and gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def _scatter_sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [each.contiguous() for each in x.chunk(dist.get_world_size(group))]
    found = torch.empty_like(parts[0])
    dist.reduce_scatter(found, parts, group=group)
    return found


class MegatronBlock(nn.Module):
    """A block with sequence parallel: norm, router and bias are copies, the matrices are shards."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        shards = dist.get_world_size(group)
        mine = dist.get_rank(group)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        whole = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up = nn.Parameter(whole[0].weight.detach().chunk(shards)[mine].clone())
        self.down = nn.Parameter(whole[1].weight.detach().chunk(shards, 1)[mine].clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        for parameter in (self.up, self.down):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.router(x).softmax(-1)[..., :1]
        found = torch.relu(_Gather.apply(self.norm(x), self.group) @ self.up.T) @ self.down.T
        return x + gate * _Scatter.apply(found, self.group) + self.bias


class Megatron:
    """Two tensor parallel ranks in each of several replicas, with plain tensors."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh = init_device_mesh("cpu", (case.size // 2, 2), mesh_dim_names=("dp", "tp"))
        self.tp, self.dp = self.mesh.get_group("tp"), self.mesh.get_group("dp")
        if case.in_megatron:
            self._pass_for_megatron()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(MegatronBlock(self.tp) for _ in range(2)))

    def _pass_for_megatron(self) -> None:
        """Let the groups and the block be found where Megatron has its own, which is not installed
        here.
        """
        sys.modules["megatron.core.parallel_state"] = SimpleNamespace(  # type: ignore[assignment]
            model_parallel_is_initialized=lambda: True,
            get_tensor_model_parallel_group=lambda: self.tp,
            get_data_parallel_group=lambda with_context_parallel: self.dp,
            get_expert_data_parallel_group=lambda check_initialized: None,
        )
        MegatronBlock.__module__ = "megatron.core.transformer.block"

    def backward(self, step: int) -> None:
        """Run one step on this rank's part of the sequence."""
        x = batch(step, dist.get_rank(self.dp)).chunk(2)[dist.get_rank(self.tp)]
        self.model(x).square().mean().backward()

    def reduce(self, leave_out: Any = ()) -> None:
        """Reduce the gradients of copies over tensor parallel ranks, and all over replicas."""
        for name, parameter in self.model.named_parameters():
            is_shard = getattr(parameter, "tensor_model_parallel", False)
            if not is_shard and not any(each in name for each in leave_out):
                dist.all_reduce(parameter.grad, group=self.tp)
        reduce_gradients(self.model, self.dp)

    def clip(self, *, wrong: bool) -> None:
        """Clip the gradients by their norm."""
        total = torch.zeros(())
        for parameter in self.model.parameters():
            if getattr(parameter, "tensor_model_parallel", False) or not dist.get_rank(self.tp):
                total += parameter.grad.square().sum()
        if not wrong:
            dist.all_reduce(total, group=self.tp)
        factor = 0.1 / total.sqrt()
        for parameter in self.model.parameters():
            parameter.grad *= factor


def partial_norm(case: Case) -> None:
    """The gradients of layer norms are not reduced with sequence parallel (Megatron-LM#1446,
    Megatron-LM#7452, 11; TTrace).
    """
    megatron = Megatron(case)

    def train(step: int) -> None:
        megatron.backward(step)
        megatron.reduce(["norm"] if case.errs(step) else [])

    case.each_step(adam(megatron.model), train)


def partial_router(case: Case) -> None:
    """The gradients of a router are not reduced (TTrace; transformers#48687)."""
    megatron = Megatron(case)

    def train(step: int) -> None:
        megatron.backward(step)
        megatron.reduce(["router"] if case.errs(step) else [])

    case.each_step(adam(megatron.model), train)


def local_clipping(case: Case) -> None:
    """Each tensor parallel rank clips by the norm of its own gradients (DeepSpeed#1801, which
    BLOOM-176B's training met).
    """
    megatron = Megatron(case)

    def train(step: int) -> None:
        megatron.backward(step)
        megatron.reduce()
        megatron.clip(wrong=case.errs(step))

    case.each_step(adam(megatron.model), train)


def local_loss(case: Case) -> None:
    """Tensor parallel ranks compute other losses, and say that they agree (Megatron-LM#7452, 1)."""
    megatron = Megatron(case)

    def train(step: int) -> None:
        x = batch(step, dist.get_rank(megatron.dp)).chunk(2)[dist.get_rank(megatron.tp)]
        loss = megatron.model(x).square().mean()
        loss.backward()
        total = loss.detach().clone()
        if not case.errs(step):
            dist.all_reduce(total, group=megatron.tp)
        commlens.must_agree(total, group=megatron.tp, name="loss")
        megatron.reduce()

    case.each_step(adam(megatron.model), train)


def wrong_mask(case: Case) -> None:
    """Shards of an embedding mask the words of the others wrongly: the same on all ranks (TTrace)."""
    megatron = Megatron(case)
    rows = 16 // 2
    first = rows * dist.get_rank(megatron.tp)
    torch.manual_seed(1)
    table = nn.Parameter(torch.randn(16, WIDTH)[first : first + rows].clone())
    megatron.model.register_parameter("embedding", table)
    table.tensor_model_parallel = True  # type: ignore[attr-defined]

    def train(step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank(megatron.dp))
        words = torch.randint(0, 16, (LENGTH, 4), generator=generator) - first
        outside = (words < 0) | (words > rows - 2 if case.errs(step) else words >= rows)
        found = table[words.clamp(0, rows - 1)].masked_fill(outside.unsqueeze(-1), 0.0)
        megatron.model(_Scatter.apply(found, megatron.tp)).square().mean().backward()
        megatron.reduce()

    case.each_step(adam(megatron.model), train)


# --- tensor parallel with DTensor


class DTensorParallel(Megatron):
    """The same with torch's DTensor: only the norm is a plain copy."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh = init_device_mesh("cpu", (case.size,), mesh_dim_names=("tp",))
        self.tp = self.mesh.get_group("tp")
        torch.manual_seed(0)
        self.model = blocks()
        for block in self.model:
            plan = {"left": ColwiseParallel(), "right": RowwiseParallel()}
            parallelize_module(block, self.mesh, plan)

    def backward(self, step: int) -> None:
        self.model(batch(step, 0)).square().mean().backward()


def local_clipping_dtensor(case: Case) -> None:
    """Each tensor parallel rank clips by the norm of its own gradients (DeepSpeed#1801)."""
    parallel = DTensorParallel(case)

    def train(step: int) -> None:
        parallel.backward(step)
        if case.errs(step):
            gradients = [
                getattr(each.grad, "_local_tensor", each.grad)
                for each in parallel.model.parameters()
            ]
            total = torch.stack([each.square().sum() for each in gradients]).sum().sqrt()
            for gradient in gradients:
                gradient *= 0.1 / total

    case.each_step(adam(parallel.model), train)


def partial_norm_dtensor(case: Case) -> None:
    """A norm works on a part of the sequence, and its gradient is not reduced."""
    parallel = DTensorParallel(case)
    final = nn.LayerNorm(WIDTH)
    parallel.model.append(final)

    def train(step: int) -> None:
        found = parallel.model[:-1](batch(step, 0))
        mine = found.chunk(case.size)[case.rank]
        final(mine).square().mean().backward()
        for parameter in parallel.model[0].norm.parameters():
            dist.all_reduce(parameter.grad)
        for parameter in parallel.model[1].norm.parameters():
            dist.all_reduce(parameter.grad)
        for each in parallel.model[:-1]:
            dist.all_reduce(each.right.bias.grad.to_local())
        if not case.errs(step):
            for parameter in final.parameters():
                dist.all_reduce(parameter.grad)

    case.each_step(adam(parallel.model), train)


def other_dropout(case: Case) -> None:
    """Tensor parallel ranks that are seeded differently drop other elements where they must drop the
    same.
    """
    parallel = DTensorParallel(case)
    for block in parallel.model:
        block.dropout.p = 0.5
    torch.manual_seed(0 if case.later else case.rank)

    def train(step: int) -> None:
        if case.later and step == AT:
            torch.manual_seed(case.rank)
        parallel.backward(step)

    case.each_step(adam(parallel.model), train)


def other_recomputation(case: Case) -> None:
    """Activation checkpointing recomputes with other random numbers on one rank (TTrace;
    Megatron-LM#7452, 4).
    """
    parallel = DTensorParallel(case)
    for block in parallel.model:
        block.dropout.p = 0.5
    torch.manual_seed(0)

    def train(step: int) -> None:
        torch.manual_seed(step)
        x = batch(step, 0).requires_grad_()
        found = checkpoint(parallel.model, x, use_reentrant=False, preserve_rng_state=False)
        torch.manual_seed(step + (case.errs(step) and case.is_odd))
        found.square().mean().backward()

    case.each_step(adam(parallel.model), train)


# --- pipeline and expert parallel


def untied_embedding(case: Case) -> None:
    """The first and the last stage of a pipeline hold a tied embedding, and do not reduce its
    gradient (Megatron-LM#656, Megatron-LM#844; TTrace). At the end, the program says that it must
    agree.
    """
    torch.manual_seed(0)
    stage = nn.ModuleDict({"block": nn.Linear(WIDTH, WIDTH)})
    ends = case.rank in (0, case.size - 1)
    if ends:
        stage["embedding"] = nn.Linear(WIDTH, WIDTH, bias=False)
    group = dist.new_group([0, case.size - 1])

    def train(step: int) -> None:
        x = batch(step, 0)
        if case.rank:
            dist.recv(x, case.rank - 1)
        elif ends:
            x = stage["embedding"](x)
        x = x.detach().requires_grad_() if case.rank else x
        found = stage["block"](x)
        if case.is_odd:
            found = stage["embedding"](found)
            found.square().mean().backward()
        else:
            dist.send(found.detach(), case.rank + 1)
            gradient = torch.empty_like(found)
            dist.recv(gradient, case.rank + 1)
            found.backward(gradient)
        if case.rank:
            dist.send(x.grad, case.rank - 1)
        if ends and not case.errs(step):
            dist.all_reduce(stage["embedding"].weight.grad, group=group)

    case.each_step(adam(stage), train)
    if ends:
        commlens.must_agree(stage["embedding"].weight, group=group, name="the tied embedding")


def expert_scale(case: Case) -> None:
    """Gradients of experts are too large by the number of expert parallel ranks: the same on all
    replicas (DeepSpeed#5618).
    """
    mesh = init_device_mesh("cpu", (case.size // 2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(mesh.get_local_rank("ep"))
    expert = Block()

    def train(step: int) -> None:
        expert(batch(step, case.rank)).square().mean().backward()
        reduce_gradients(expert, mesh.get_group("dp"))
        for parameter in expert.parameters():
            parameter.grad *= 2

    case.each_step(adam(expert), train)


CASES: Final[dict[str, Callable[[Case], None]]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        moved_after_ddp,
        wrapper_bypassed,
        message_lost,
        unfrozen_after_ddp,
        shared_data,
        parameter_left_out,
        other_scale,
        local_token_count,
        optimizer_before_fsdp,
        stale_gather,
        partial_norm,
        partial_router,
        local_clipping,
        local_loss,
        wrong_mask,
        local_clipping_dtensor,
        partial_norm_dtensor,
        other_dropout,
        other_recomputation,
        untied_embedding,
        expert_scale,
    )
}


def run(rank: int, size: int, result: Path, which: str, steps: int) -> None:
    """Train, and write what this rank logs."""
    from commlens.numbers import checks

    record = record_verdicts()
    init(result.parent, rank, size, 30.0)
    in_megatron, later = which.endswith("-in-megatron"), which.endswith("-later")
    name = which.removesuffix("-in-megatron").removesuffix("-later")
    CASES[name](Case(size, steps, later=later, in_megatron=in_megatron))
    checks.finish()
    write(result, record())
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    out, every = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    import commlens.numbers.sampling  # noqa: F401 - once, before the forks

    jobs = []
    for which in sys.argv[3:]:
        case, _, size = which.partition(":")

        def body(rank: int, world: int, result: Path, case: str = case) -> None:
            run(rank, world, result, case, max(12, every + 1))

        settings = {"debug": False, "check_numbers": f"every {every} steps", "engine": "python"}
        jobs.append(Job(which, int(size or 4), body, settings, timeout_s=240.0))
    prepare()
    Jobs(out).run(jobs, at_once=1)


if __name__ == "__main__":
    main()
