"""Previews programs in one process and writes what came of it as JSON: ``python preview_programs.py
OUT FAMILY...``. Run by test_preview.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import traced_jobs
from launching import fsdp2_runs_on_cpu
from oracle import truth
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import commlens
from commlens.tap import tap


def counts(trace: commlens.Trace) -> dict[str, int]:
    return trace.counts("op")


def family_counts(family: Any) -> dict[str, Any]:
    """Collectives of one family: as the oracle sees them on the bare fake backend, and as previews
    on real and on fake tensors do.
    """
    world = families.World(backend=families.FAKE, rank=0, size=8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    program = family.build(world)
    with truth() as seen:
        family.step(program)
    dist.destroy_process_group()
    found: dict[str, Any] = {"truth": sum(seen.values())}
    for name, fake in (("real", False), ("fake", True)):
        inside: list[commlens.Trace] = []

        def run(inside: list[commlens.Trace] = inside, fake: bool = fake) -> None:
            dist.init_process_group("gloo")
            program = family.build(world)
            with commlens.trace() as trace:
                trace.tracer.sees_fake_tensors = fake
                family.step(program)
            inside.append(trace)

        commlens.preview(run, world_size=8, fake_tensors=fake)
        found[name] = inside[-1].calls
        found[f"{name} unclassified"] = inside[-1].coverage.unclassified
    return found


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))


def ddp() -> None:
    assert torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    assert dist.get_backend() == "nccl"
    model = nn.parallel.DistributedDataParallel(
        mlp(64).to(local_rank), device_ids=[local_rank], bucket_cap_mb=0.004
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(2, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def ddp_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(mlp().cuda())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model(torch.randn(2, 8).cuda()).sum().backward()


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    widths = [8, 16, 32, 64, 128]
    stage = PipelineStage(
        nn.Linear(widths[rank], widths[rank + 1]), rank, size, torch.device("cuda")
    )
    schedule = Schedule1F1B(
        stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).pow(2).sum()
    )
    if rank == 0:
        schedule.step(torch.randn(8, widths[0]))
    elif rank == size - 1:
        schedule.step(target=torch.randn(8, widths[size]))
    else:
        schedule.step()


def objects() -> None:
    dist.init_process_group("gloo", init_method="tcp://nowhere:1", rank=99, world_size=5)
    rank, size = dist.get_rank(), dist.get_world_size()
    config = [{"rate": 0.5, "of": rank}, "x" * 100] if rank == 0 else [None, None]
    dist.broadcast_object_list(config, 0)
    assert config == [{"rate": 0.5, "of": 0}, "x" * 100], config
    shard: list[Any] = [None]
    dist.scatter_object_list(
        shard, [("shard", r, "y" * r) for r in range(size)] if rank == 0 else None, src=0
    )
    assert shard == [("shard", rank, "y" * rank)], shard
    if rank > 0:
        dist.recv_object_list(shard, src=rank - 1)
        assert shard == [("from", rank - 1)], shard
    if rank < size - 1:
        dist.send_object_list([("from", rank)], dst=rank + 1)
    gathered = [None] * size
    dist.all_gather_object(gathered, rank)
    dist.gather_object(rank, gathered if rank == 1 else None, dst=1)
    assert gathered == [rank] * size
    dist.recv(torch.ones(3))
    dist.monitored_barrier()
    store = dist.TCPStore("nowhere", 1, size, rank == 0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("arrived", 1) == size
    store.wait(["set by somebody else"])


def objects_anyhow() -> None:
    """Objects whose senders must be found, in code that catches what ends it."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    thing: list[Any] = [rank]
    with contextlib.suppress(BaseException):
        dist.broadcast_object_list(thing, 1)
    assert thing == [1], thing
    thing = [rank]
    thread = threading.Thread(target=dist.broadcast_object_list, args=(thing, 2))
    thread.start()
    thread.join()
    assert thing == [2], thing
    if rank == 0:
        for other in range(1, size):
            dist.send_object_list([{"of": rank, "weight": torch.ones(3)}], other)
    else:
        dist.recv_object_list(thing, 0)
        assert thing[0]["of"] == 0, thing
        assert thing[0]["weight"].shape == (3,)


def no_source() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        raise ValueError("no data here")
    dist.broadcast_object_list([dist.get_rank()], 0)


def spawned() -> None:
    torch.multiprocessing.spawn(_spawned, args=("x",), nprocs=4)


def _spawned(rank: int, what: str) -> None:
    assert (rank, what) == (2, "x")
    dist.init_process_group("nccl", rank=rank, world_size=4)
    dist.all_reduce(torch.ones(2, device=f"cuda:{rank}"))


def exchange() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (4,))
    with torch.device("cuda"):
        tensor = torch.ones(16, 16)
    distribute_tensor(tensor, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)]).to_local().sum()


def huge() -> None:
    dist.init_process_group("nccl")
    weight = torch.ones(1 << 20, 1 << 20, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(weight)
    print(weight[0, 0].item(), file=sys.stderr)


PROGRAMS: dict[str, tuple[Callable[[], None], int, int]] = {
    "ddp": (ddp, 4, 2),
    "ddp_hook": (ddp_hook, 4, 0),
    "pipeline first": (pipeline, 4, 0),
    "pipeline middle": (pipeline, 4, 2),
    "pipeline last": (pipeline, 4, 3),
    "objects source": (objects, 4, 0),
    "objects": (objects, 4, 3),
    "objects anyhow": (objects_anyhow, 4, 3),
    "spawned": (spawned, 4, 2),
    "exchange": (exchange, 4, 1),
}


def state() -> Any:
    """What a preview must leave alone."""
    owners: list[Any] = [
        dist,
        c10d,
        torch.cuda,
        torch.utils,
        torch.multiprocessing,
        DeviceMesh,
        nn.parallel.DistributedDataParallel,
    ]
    names = {
        f"{owner.__name__}.{name}": id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value)
    }
    return (
        names,
        dict(os.environ),
        len(tap._subscribers),
        id(sys.excepthook),
        torch.get_rng_state().tolist(),
        dist.is_initialized(),
    )


def main(out: Path, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report: dict[str, Any] = {"families": {}, "programs": {}}
    cases = {family.name: family for family in families.cases(families.FAKE, 8)}
    for name in wanted:
        if name in cases:
            report["families"][name] = family_counts(cases[name])
    commlens.preview(ddp, world_size=4)  # the first one imports what it needs
    before = state()
    for name, (program, size, rank) in PROGRAMS.items():
        found = report["programs"][name] = {}
        for kind, fake in (("real", False), ("fake", True)):
            try:
                trace = commlens.preview(program, world_size=size, rank=rank, fake_tensors=fake)
                found[kind] = counts(trace)
                found[f"{kind} as"] = [
                    trace.data.rank,
                    trace.data.world_size,
                    trace.data.preview,
                    trace.coverage.unclassified,
                ]
            except Exception as error:
                found[kind] = f"{type(error).__name__}: {error}"
    trace = commlens.preview(huge, world_size=2, fake_tensors=True)
    report["huge"] = [trace.events[0].input_bytes, trace.coverage.blind]
    report["ddp owners"] = dict(
        Counter(
            e.owner.name
            for e in commlens.preview(ddp, world_size=4).events
            if e.owner and e.step == 2
        )
    )
    report["unchanged"] = [
        name for name, (was, is_) in enumerate(zip(before, state(), strict=True)) if was != is_
    ] or True
    report["errors"] = {}
    for name, call in {
        "rank": lambda: commlens.preview(ddp, world_size=4, rank=4),
        "raises": lambda: commlens.preview(lambda: 1 / 0, world_size=4),
        "values": lambda: commlens.preview(
            lambda: torch.ones(3).nonzero(), world_size=4, fake_tensors=True
        ),
        "no source": lambda: commlens.preview(no_source, world_size=4, rank=2),
    }.items():
        try:
            call()
        except Exception as error:
            report["errors"][name] = f"{type(error).__name__}: {error}"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        commlens.preview(ddp, world_size=4)
    except Exception as error:
        report["errors"]["group"] = f"{type(error).__name__}: {error}"
    assert dist.get_world_size() == 2
    dist.destroy_process_group()
    report["three dimensions"] = {}
    for size, ranks in ((8, (3, 6)), (64, (21, 42))) if fsdp2_runs_on_cpu() else ():
        for rank in ranks:
            trace = commlens.preview(
                lambda: traced_jobs.run(traced_jobs.three_dimensions), world_size=size, rank=rank
            )
            groups = {
                label: list(group.ranks) for group in trace.data.groups if (label := group.mesh_dim)
            }
            counted = {" ".join(key): calls for key, calls in trace.counts(("group", "op")).items()}
            report["three dimensions"][f"{size} {rank}"] = [
                groups,
                counted,
                trace.coverage.unclassified,
            ]
    steps = commlens.preview(ddp, world_size=4, steps=2)
    report["steps"] = [steps.data.steps, max(event.step for event in steps.events)]
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    started = time.time()
    main(Path(sys.argv[1]), sys.argv[2:])
    print(f"{time.time() - started:.1f} s")
