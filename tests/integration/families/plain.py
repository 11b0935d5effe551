"""Calls of torch.distributed without any model: every op, object collectives, coalescing, other
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from . import LARGE, ONLY_FAKE, ONLY_GLOO, Program, World, family


def neighbours(world: World) -> tuple[int, int]:
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


@family(LARGE)
def plain_calls(world: World) -> Program:
    size = world.size
    first_half = dist.new_group(list(range(size // 2)))

    def step() -> Sequence[torch.Tensor]:
        x = torch.arange(float(4 * size))
        shards = [torch.zeros(4) for _ in range(size)]
        out, part = torch.zeros(4 * size), torch.zeros(4)
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
        if world.rank < size // 2:
            dist.all_reduce(x, group=first_half)
        dist.broadcast(x, 0)
        dist.reduce(x, size - 1)
        dist.all_gather(shards, part)
        dist.all_gather_into_tensor(out, part)
        dist.reduce_scatter_tensor(part, out)
        # gloo did not have it then
        if world.backend == "fake" or not torch.__version__.startswith("2.6"):
            dist.reduce_scatter(part, list(out.chunk(size)))
        dist.all_to_all_single(out, x)
        dist.gather(part, shards if world.rank == 0 else None, dst=0)
        dist.scatter(part, shards if world.rank == 0 else None, src=0)
        dist.barrier()
        return [x, out, part] if world.backend == "gloo" else []

    return Program([], step)


@family(ONLY_FAKE)
def all_to_all_lists(world: World) -> Program:
    def step() -> Sequence[torch.Tensor]:
        dist.all_to_all(
            [torch.zeros(2) for _ in range(world.size)], [torch.ones(2) for _ in range(world.size)]
        )
        return []

    return Program([], step)


@family(ONLY_GLOO)
def monitored_barriers(world: World) -> Program:
    def step() -> Sequence[torch.Tensor]:
        dist.monitored_barrier(timeout=timedelta(seconds=10))
        return []

    return Program([], step)


@family()
def point_to_point(world: World) -> Program:
    after, before = neighbours(world)

    def step() -> Sequence[torch.Tensor]:
        x, received = torch.full((3,), float(world.rank)), torch.zeros(3)
        if world.rank % 2 == 0:
            dist.send(x, after, tag=7)
            dist.recv(received, before, tag=7)
        else:
            dist.recv(received, before, tag=7)
            dist.send(x, after, tag=7)
        sending, receiving = dist.isend(x, after), dist.irecv(received, before)
        receiving.wait()
        sending.wait()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, received, before)]
        ):
            work.wait()
        return [received]

    return Program([], step)


@family(ONLY_GLOO)
def receive_from_anyone(world: World) -> Program:
    def step() -> Sequence[torch.Tensor]:
        received = torch.zeros(1)
        if world.rank == 0:
            for _ in range(world.size - 1):
                dist.recv(received)
        else:
            dist.send(torch.ones(1), 0)
        return [received]

    return Program([], step)


@family(ONLY_GLOO)
def objects(world: World) -> Program:
    def step() -> Sequence[torch.Tensor]:
        everyone: list[object] = [None] * world.size
        dist.all_gather_object(everyone, {"rank": world.rank})
        sent: list[object] = ["from 0" if world.rank == 0 else None]
        dist.broadcast_object_list(sent, src=0)
        dist.gather_object(world.rank, [None] * world.size if world.rank == 0 else None, dst=0)
        mine: list[object] = [None]
        dist.scatter_object_list(mine, list(range(world.size)) if world.rank == 0 else None, src=0)
        if world.rank == 0:
            dist.send_object_list(["x"], 1)
        elif world.rank == 1:
            dist.recv_object_list(mine, 0)
        assert sent == ["from 0"] and len(everyone) == world.size
        return []

    return Program([], step)


@family()
def coalescing(world: World) -> Program:
    def step() -> Sequence[torch.Tensor]:
        a, b = torch.ones(3), torch.ones(5)
        with _coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
        reduced = functional.all_reduce_coalesced(
            [torch.ones(2), torch.ones(3)], "sum", dist.group.WORLD
        )
        gathered = functional.all_gather_into_tensor_coalesced(
            [torch.ones(2), torch.ones(3)], dist.group.WORLD
        )
        return [
            a,
            b,
            *(functional.wait_tensor(t) for t in reduced),
            *(functional.wait_tensor(t) for t in gathered),
        ]

    return Program([], step)


@family()
def functional_calls(world: World) -> Program:
    def step() -> Sequence[torch.Tensor]:
        size, group = world.size, dist.group.WORLD
        x = torch.ones(size * 2, 3)
        outs = [
            functional.all_reduce(x, "avg" if world.backend == "fake" else "sum", group),
            functional.all_gather_tensor(x, 0, group),
            functional.reduce_scatter_tensor(x, "sum", 0, group),
            functional.all_to_all_single(x, [2] * size, [2] * size, group),
            functional.broadcast(x, 0, group),
        ]
        y = torch.ones(4)
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce_(y, "sum", group.group_name)
        )
        return [y, *(functional.wait_tensor(out) for out in outs)]

    return Program([], step)


@family()
def other_threads(world: World) -> Program:
    """Two threads besides the main one, each with a group of its own."""
    groups = [dist.new_group() for _ in range(2)]

    def step() -> Sequence[torch.Tensor]:
        sums = [torch.ones(3) * (i + 1) for i in range(2)]

        def work(number: int) -> None:
            for _ in range(3):
                dist.all_reduce(sums[number], group=groups[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        own = torch.ones(2)
        dist.all_reduce(own)
        for thread in threads:
            thread.join()
        return [own, *sums]

    return Program([], step)
