"""A healthy job in which a rank pauses, again and again: ``pausing_job.py KIND:RANK:SECONDS ...``.

It trains for some steps before each pause and after the last.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

STEPS = 15  # before a pause, and after the last
BURN = "import time; end = time.time() + {}\nwhile time.time() < end: pass"


def asleep(seconds: float) -> None:
    time.sleep(seconds)


def reading(seconds: float) -> None:
    """Read a file and compute its checksum."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(1 << 22))
        file.flush()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            hashlib.sha256(Path(file.name).read_bytes())


def write_checkpoint(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.save(torch.zeros(1 << 18), f"{folder}/checkpoint.pt")
            time.sleep(0.05)


def compile_kernels(seconds: float) -> None:
    """Wait for a child process that uses a core."""
    subprocess.run([sys.executable, "-c", BURN.format(seconds)], check=True)


def evaluate(seconds: float) -> None:
    end, x = time.monotonic() + seconds, torch.ones(64, 64)
    while time.monotonic() < end:
        x = torch.tanh(x @ x)


def collect_garbage(seconds: float) -> None:
    kept = [[number] for number in range(400_000)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gc.collect()
    del kept


class LateBatch(Dataset[float]):
    """One batch, which comes late."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        time.sleep(self.seconds)
        return 1.0


def await_loader(seconds: float) -> None:
    """Wait for a data loader whose worker process has no data for a while."""
    list(DataLoader(LateBatch(seconds), num_workers=1))


def stop_and_go_on(seconds: float) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def read_slow_disk(seconds: float) -> None:
    """Read a file of which nothing comes for a while: here a pipe."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/shard"
        os.mkfifo(path)
        subprocess.Popen(["sh", "-c", f"exec 3>{path}; sleep {seconds}; echo data >&3"])
        Path(path).read_bytes()


def download(seconds: float) -> None:
    """Download from a server whose relay stops for a while."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_serve, args=(server, seconds), daemon=True)
        sender.start()
        with socket.create_connection(server.getsockname()) as client:
            while client.recv(4096):
                pass


def _serve(server: socket.socket, seconds: float) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"x" * 100_000)
        time.sleep(seconds)
        connection.sendall(b"x" * 100_000)


def network_down(seconds: float) -> None:
    """Lose all packets on the loopback interface, which must be this job's own."""
    subprocess.Popen(["sh", "-c", f"ip link set lo down; sleep {seconds}; ip link set lo up"])
    time.sleep(0.05)


def wait_for_a_lock(seconds: float) -> None:
    """Wait for a file's lock that another process holds for a while."""
    with tempfile.NamedTemporaryFile() as file:
        holder = subprocess.Popen(["flock", file.name, "sleep", str(seconds)])
        time.sleep(0.3)
        fcntl.flock(file, fcntl.LOCK_EX)
        holder.wait()


def wait_for_a_thread(seconds: float) -> None:
    thread = threading.Thread(target=time.sleep, args=(seconds,))
    thread.start()
    thread.join()


def lose_the_cores(seconds: float) -> None:
    """Compute while a neighbour takes the cores."""
    code = BURN.format(seconds)
    for _ in range(2 * (os.cpu_count() or 1)):
        subprocess.Popen([sys.executable, "-c", code])
    os.nice(5)
    evaluate(0.3)


KINDS: dict[str, Callable[[float], None]] = {
    "asleep": asleep,
    "reading": reading,
    "checkpoint": write_checkpoint,
    "compilation": compile_kernels,
    "evaluation": evaluate,
    "garbage": collect_garbage,
    "stopped": stop_and_go_on,
    "slow-disk": read_slow_disk,
    "download": download,
    "network": network_down,
    "lock": wait_for_a_lock,
    "thread": wait_for_a_thread,
    "neighbour": lose_the_cores,
    "loader": await_loader,
}
ON_RANK_0 = ("checkpoint", "evaluation")
"""Kinds after which all ranks meet in a barrier of their own."""


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


def main(pauses: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for pause in [*pauses, None]:
        for _ in range(STEPS):
            time.sleep(0.03)
            train_step(model, optimizer, torch.randn(8, 16))
        if pause is not None:
            kind, chosen, seconds = pause.split(":")
            if rank == int(chosen):
                KINDS[kind](float(seconds))
            if kind in ON_RANK_0:
                dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} ends", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
