"""A program whose ranks get objects from each other, one after the other."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from commlens.check.run_rank import Plan

SIZE = 4


def chain(folder: Path) -> Plan:
    """Each rank gets an object from the rank before it, and reduces a tensor of that size."""

    def program() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        with (folder / "starts").open("a") as file:
            file.write(f"{rank}\n")
        given = [5]
        if rank:
            dist.recv_object_list(given, src=rank - 1)
        if rank < SIZE - 1:
            dist.send_object_list([given[0] + 1], dst=rank + 1)
        os.write(1, f"rank {rank} has {given[0]}\n".encode())
        dist.broadcast(torch.zeros(given[0]), src=rank)

    return Plan(program, SIZE, timeout_s=60.0)
