"""One process of a job of several worlds, in the shape of programs of reinforcement learning and
serving, with at most one fault. The soak of worlds (worlds_soak.py) starts all processes of a job.

Usage: _worlds_program.py SHAPE ROLE, with RANK, WORLD_SIZE and MASTER_PORT as usual, GROUP_PORT of
the store of groups made by hand, and FAULT, CULPRIT (ROLE:RANK), STEP and SIZES (the number of
processes of each role, as JSON). Prints a checksum of what its collectives gave.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

WAIT = datetime.timedelta(seconds=100)
SHAPE, ROLE = sys.argv[1:3]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = int(os.environ["GROUP_PORT"])
FAULT, STEP = os.environ["FAULT"], int(os.environ["STEP"])
SIZES = json.loads(os.environ["SIZES"])
AT_FAULT = os.environ["CULPRIT"] == f"{ROLE}:{RANK}"
STEPS = 6
total = torch.zeros(1, dtype=torch.float64)
stores: list[dist.Store] = []  # kept: the end of a quorum's server would cut off who comes early


def wait_for_a_file() -> None:
    """Stand still, as a process that waits for something outside."""
    while not os.path.exists("/nonexistent/ready"):  # noqa: PTH110
        time.sleep(0.5)


def store_of(member: int, size: int) -> dist.Store:
    """Return a client of the group's store, or in member 0 its server."""
    port = PORT
    if AT_FAULT and FAULT == "stale address":
        port = int(os.environ["STALE_PORT"])
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        size,
        member == 0,
        timeout=WAIT,
        wait_for_workers=False,
        multi_tenant=True,
    )
    stores.append(store)
    return store


def told(size: int, prefix: str) -> tuple[int, str]:
    """Return size and prefix of a group as this process was told them."""
    if AT_FAULT and FAULT == "wrong size":
        size += 1
    if AT_FAULT and FAULT == "old prefix":
        prefix = f"{prefix}-old"
    return size, prefix


def come_to_creation() -> None:
    """Come to the creation of a group, or not."""
    if AT_FAULT and FAULT == "never joins":
        wait_for_a_file()


def bare_group(member: int, size: int, prefix: str) -> dist.ProcessGroup:
    """Make a group that is in none of c10d's maps."""
    come_to_creation()
    store = store_of(member, size)
    size, prefix = told(size, prefix)
    store = dist.PrefixStore(prefix, store)
    group = dist.ProcessGroup(store, member, size)
    backend = ProcessGroupGloo(store, member, size, timeout=WAIT)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def joined_group(member: int, size: int, name: str) -> dist.ProcessGroup:
    """Make a group by c10d's helper, and write a mapping that is false."""
    come_to_creation()
    store = store_of(member, size)
    told_size, name = told(size, name)
    group, _ = c10d._new_process_group_helper(
        told_size,
        member,
        [],
        c10d.Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=WAIT,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def fault_at(step: int) -> None:
    """Do what the fault asks for before a step."""
    if not AT_FAULT or step != STEP:
        return
    if FAULT == "late":
        wait_for_a_file()
    elif FAULT == "raises":
        raise ValueError("bad batch")
    elif FAULT == "dies":
        os._exit(7)


def exchange(group: dist.ProcessGroup, values: torch.Tensor, step: int, root: int = 0) -> None:
    """Broadcast two buckets and sum a third, as a synchronisation of weights; the fault may swap
    the ops or leave one out.
    """
    fault_at(step)
    swapped = AT_FAULT and step == STEP and FAULT == "another order"
    left_out = AT_FAULT and step == STEP and FAULT == "skips"
    work = [
        lambda: group.broadcast(values, root).wait(),
        lambda: group.allreduce(values).wait(),
    ]
    for each in reversed(work) if swapped else work[left_out:]:
        each()
    total.add_(values.double().sum())
    values.div_(values.abs().max() + 1)


def weight_sync() -> None:
    """Trainers train; trainer 0 and all rollout workers meet in a group made by hand."""
    dist.init_process_group("gloo", timeout=WAIT)
    member = RANK + 1 if ROLE == "rollout" else 0
    joins = ROLE == "rollout" or RANK == 0
    group = joined_group(member, SIZES["rollout"] + 1, "weight_sync") if joins else None
    for step in range(STEPS):
        gradients = torch.full((16,), float(RANK + step))
        dist.all_reduce(gradients)
        total.add_(gradients.double().sum())
        if group is not None:
            exchange(group, torch.full((32,), float(step + member)), step)
        dist.barrier()


def pairs() -> None:
    """Ranks 1 and 2 of a world have a group of their own; the others work elsewhere."""
    dist.init_process_group("gloo", timeout=WAIT)
    group = bare_group(RANK - 1, 2, "pair") if RANK in (1, 2) else None
    for step in range(STEPS):
        if group is not None:
            exchange(group, torch.full((8,), float(step + RANK)), step)
        dist.barrier()


def engines() -> None:
    """Engines without a default group agree now and then whether all have finished; idle ones run
    a dummy step.
    """
    group = bare_group(RANK, SIZE, "dp")
    for step in range(STEPS):
        torch.randn(64, 64) @ torch.randn(64, 64)
        exchange(group, torch.full((2,), float(step + RANK)), step)


def server() -> None:
    """Rank 0 broadcasts the size of a command, and the command if there is one."""
    dist.init_process_group("gloo", timeout=WAIT)
    control = dist.new_group(backend="gloo", timeout=WAIT)
    for step in range(STEPS):
        fault_at(step)
        if AT_FAULT and step == STEP and FAULT == "skips":
            continue
        size = torch.tensor([8 * (step % 2)])
        dist.broadcast(size, 0, group=control)
        if size.item():
            payload = torch.full((int(size),), float(RANK + step))
            dist.broadcast(payload, 0, group=control)
            dist.all_reduce(payload)
            total.add_(payload.double().sum())


def quorums() -> None:
    """A group is made again at each quorum, in a second thread, with a new prefix."""
    dist.init_process_group("gloo", timeout=WAIT)
    for quorum in (1, 2):
        made: list[dist.ProcessGroup] = []

        def configure(quorum: int = quorum, made: list[dist.ProcessGroup] = made) -> None:
            if quorum == 1 and FAULT in ("never joins", "wrong size", "old prefix"):
                made.append(first_quorum())
            else:
                made.append(bare_group(RANK, SIZE, f"torchft/{quorum}/0"))

        thread = threading.Thread(target=configure, name="async_quorum")
        thread.start()
        thread.join()
        for step in range(STEPS // 2):
            exchange(made[0], torch.full((8,), float(step + RANK)), 3 * (quorum - 1) + step)
    dist.barrier()


def first_quorum() -> dist.ProcessGroup:
    """Make the first quorum's group without the fault."""
    global AT_FAULT
    at_fault, AT_FAULT = AT_FAULT, False
    group = bare_group(RANK, SIZE, "torchft/1/0")
    AT_FAULT = at_fault
    return group


def restart() -> None:
    """All ranks destroy their groups and initialise again in the same process."""
    store = dist.TCPStore("127.0.0.1", PORT, SIZE, RANK == 0, timeout=WAIT, wait_for_workers=False)
    for life in (1, 2):
        prefix = f"iteration-{life}"
        if life == 2 and AT_FAULT:
            if FAULT == "never joins":
                wait_for_a_file()
            if FAULT == "old prefix":
                prefix = "iteration-1b"
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(prefix, store),
            rank=RANK,
            world_size=SIZE,
            timeout=WAIT,
        )
        for step in range(STEPS // 2):
            values = torch.full((8,), float(step + RANK))
            fault_at(3 * (life - 1) + step)
            if not (AT_FAULT and FAULT == "skips" and 3 * (life - 1) + step == STEP):
                dist.broadcast(values, 0)
            dist.all_reduce(values)
            total.add_(values.double().sum())
        dist.barrier()
        dist.destroy_process_group()


globals()[SHAPE]()
print(f"{ROLE} {RANK} result {total.item():.6f}", flush=True)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
