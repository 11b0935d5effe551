"""A real job of any size on gloo that stops in one of several ways, for test_hardware.py.

``stuck``: all ranks enter a collective, and the network carries nothing more: what they send to each
other is lost. ``missing``: rank 2 stays in its data loader. ``dead``: rank 2 aborts.

Args: how it stops; then, if the kernel of this machine is to log something as it does, the log's file
and the message.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 3
PAUSE_S = 2.5  # before the last step: what happens here meets no collective
kept: list[object] = []


def lose_what_is_sent() -> None:
    """Put a socket that nobody reads in the place of each connection to a peer, and keep that open."""
    store = int(os.environ["MASTER_PORT"])
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        try:
            connection = socket.socket(fileno=os.dup(number))
        except OSError:
            continue  # no socket
        kept.append(connection)
        try:
            ports = connection.getsockname()[1], connection.getpeername()[1]
        except (OSError, IndexError, TypeError):
            continue  # of another family, or it listens
        if connection.type == socket.SOCK_STREAM and store not in ports:
            ours, nobody = socket.socketpair()
            ours.setblocking(False)
            os.dup2(ours.fileno(), number)
            kept.extend((ours, nobody))


def log_as_the_kernel(file: str, message: str) -> None:
    with Path(file).open("a") as log:
        log.write(f"{time.time():.6f} node kernel: {message}\n")


def load_batch(rank: int, how: str, last: bool) -> torch.Tensor:
    if last and how == "missing" and rank == 2:
        time.sleep(600)
    return torch.ones(1 << 20)


def main(how: str, *logged: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(STEPS + 1):
        last = step == STEPS
        if last:
            dist.barrier()
            time.sleep(PAUSE_S / 2)
            if rank == 0 and logged:
                log_as_the_kernel(*logged)
            time.sleep(PAUSE_S / 2)
            if how == "stuck":
                lose_what_is_sent()
        batch = load_batch(rank, how, last)
        if last and how == "dead" and rank == 2:
            os.abort()
        dist.all_reduce(batch)
    print(f"rank {rank} has come through")


if __name__ == "__main__":
    main(*sys.argv[1:])
