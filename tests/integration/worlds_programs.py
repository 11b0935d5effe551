"""Programs of several worlds, for test_worlds.py: each process makes groups by hand as programs of
reinforcement learning and serving do, and one member may come late.

Usage: worlds_programs.py SHAPE LATE ROLE, with RANK, WORLD_SIZE and MASTER_PORT as usual, and
GROUP_PORT (and GROUP_HOST, if it is not here) of the store of the group that is made by hand. LATE
is ROLE:RANK of the process that sleeps until there is the file GO, or nobody. With ALONE, the
process begins anew, with the value of it as COMMLENS.
"""

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

if "ALONE" in os.environ:
    os.environ["COMMLENS"] = os.environ.pop("ALONE")
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]  # which the zygote has
    os.execv(sys.executable, [sys.executable, *sys.argv])

WAIT = datetime.timedelta(seconds=90)
SHAPE, LATE, ROLE = sys.argv[1:4]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST, PORT = os.environ.get("GROUP_HOST", "127.0.0.1"), int(os.environ["GROUP_PORT"])


def server_of(rank, size):
    return dist.TCPStore(
        HOST, PORT, size, rank == 0, timeout=WAIT, wait_for_workers=False, multi_tenant=True
    )


def bare_group(rank, size, prefix):
    """In none of c10d's maps, as vLLM's stateless groups and torchft's."""
    store = dist.PrefixStore(prefix, server_of(rank, size))
    group = dist.ProcessGroup(store, rank, size)
    backend = ProcessGroupGloo(store, rank, size, timeout=WAIT)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    backend._set_sequence_number_for_group()
    return group


def joined_group(rank, size, name):
    """In c10d's maps, with a mapping that is false, as SGLang's, slime's and AReaL's."""
    store = dist.PrefixStore(name, server_of(rank, size))
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), store, group_name=name, timeout=WAIT
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def sleep():
    end = time.monotonic() + 60
    while not Path(os.environ["GO"]).exists() and time.monotonic() < end:
        time.sleep(0.2)


def maybe_late():
    if f"{ROLE}:{RANK}" == LATE:
        sleep()  # the culprit


def part_of_a_world():
    """Ranks 1 and 2 of 3 have a group of their own; rank 0 is busy elsewhere."""
    dist.init_process_group("gloo", timeout=WAIT)
    if RANK > 0:
        group = bare_group(RANK - 1, 2, "pair")
        for step in range(5):
            if step == 3:
                maybe_late()
            group.allreduce([torch.ones(2)]).wait()
    elif LATE != "nobody":
        sleep()
    dist.barrier()


def no_server():
    """Rank 2 needs the store that rank 1 is to make for both; rank 0 is in a barrier."""
    dist.init_process_group("gloo", timeout=WAIT)
    if RANK > 0:
        maybe_late()
        bare_group(RANK - 1, 2, "pair")
    dist.barrier()


def commands():
    """Workers take commands in a loop; rank 1 answers. The driver asks for a result too early."""
    dist.init_process_group("gloo", timeout=WAIT)
    store = dist.PrefixStore("results", c10d._get_default_store())
    for step in range(5):
        command = [f"step {step}"]
        if step == 3 and f"{ROLE}:{RANK}" == LATE:
            with contextlib.suppress(dist.DistStoreError):  # a result before its command
                store.wait([f"result-{step}"], datetime.timedelta(seconds=20))
        dist.broadcast_object_list(command, src=0)
        if RANK == 1:
            store.set(f"result-{step}", command[0])
        elif RANK == 0:
            store.get(f"result-{step}")


def no_default_group():
    """As vLLM's engines."""
    group = bare_group(RANK, SIZE, "engines")
    for step in range(5):
        if step == 3:
            maybe_late()
        group.allreduce([torch.ones(2)]).wait()


def made_again():
    """As torchft's quorums."""
    dist.init_process_group("gloo", timeout=WAIT)
    for quorum in (1, 2):
        group = bare_group(RANK, SIZE, f"torchft/{quorum}/0")
        for step in range(3):
            if (quorum, step) == (2, 1):
                maybe_late()
            group.allreduce([torch.ones(2)]).wait()
    dist.barrier()


def two_worlds():
    """Trainer 0 sends weights to all rollout workers."""
    dist.init_process_group("gloo", timeout=WAIT)
    weights, member = (
        torch.ones(8),
        {"trainer:0": 0, "rollout:0": 1, "rollout:1": 2}.get(f"{ROLE}:{RANK}"),
    )
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    group = joined_group(member, 3, "weight_sync") if member is not None else None
    for step in range(5):
        if step == 3:
            maybe_late()
        if group is not None:
            group.allreduce([weights]).wait()
    dist.barrier()


def end_at_go():
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.2)
    os._exit(0)


def checkpointers():
    """Each rank has a process that writes its checkpoints, which meets the others' in a group of
    its own; the late rank does not ask it for the second one.
    """
    (told, ask), (ready, tell) = multiprocessing.Pipe(False), multiprocessing.Pipe(False)
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
        os.environ["MASTER_PORT"] = str(PORT)
        told.recv()
        dist.init_process_group("gloo", timeout=WAIT)
        while tell.send(".") is None and told.recv():
            dist.gather_object(RANK, [None] * SIZE if RANK == 0 else None)
    if LATE != "nobody":
        threading.Thread(target=end_at_go, daemon=True).start()
    dist.init_process_group("gloo", timeout=WAIT)
    for step in range(3):
        dist.all_reduce(torch.ones(2))
        if step == 2 and f"{ROLE}:{RANK}" == LATE:
            dist.barrier()
        ask.send("save")
        ready.recv()
    dist.barrier()


globals()[SHAPE]()
if dist.is_initialized():
    dist.destroy_process_group()
