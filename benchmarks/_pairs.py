"""Two sets of real processes, one bare and one recorded, that take turns: the machinery of the paired benchmarks."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Prepare = Callable[[int, int], dict[str, Callable[[], object]]]
"""Called in a process with its rank and the world size once the process group stands: names and what to run for each."""


def _member(rank: int, world_size: int, backend: str, port: int, box_dir: str | None, prepare: Prepare, pipe: Connection) -> None:
    """One process: waits for (case, number of runs), runs them, answers with (wall, CPU) ns per run."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if box_dir is not None:
        from commlens import config
        from commlens.capture import bootstrap

        bootstrap.start(config.Settings(box_dir=box_dir, job=f"bench-{port}", dump_dir=box_dir))
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend)
    cases = prepare(rank, world_size)
    while True:
        order = pipe.recv()
        if order is None:
            break
        case, count = order
        run = cases[case]
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(count):
            run()
        pipe.send(((time.perf_counter_ns() - wall) / count, (time.process_time_ns() - cpu) / count))
    dist.destroy_process_group()


class Pair:
    """A bare and a recorded set of processes that run the same program."""

    def __init__(self, sets: list[list[Connection]]) -> None:
        self._sets = sets

    def compare(self, case: str, *, rounds: int, runs: int) -> dict[str, Any]:
        """Let both run a case in turns, ``rounds`` blocks of ``runs``. Times in us: medians over blocks, slowest rank of each."""
        for pipes in self._sets:
            self._block(pipes, case, runs)
        pairs = [tuple(self._block(pipes, case, runs) for pipes in self._sets) for _ in range(rounds)]
        added = sorted((recorded[0] - bare[0]) / 1000 for bare, recorded in pairs)
        return {
            "case": case,
            "bare_us": round(statistics.median(bare[0] for bare, _ in pairs) / 1000, 2),
            "added_us": round(statistics.median(added), 2),
            "added_us_quartiles": [round(added[len(added) // 4], 2), round(added[3 * len(added) // 4], 2)],
            "added_cpu_us": round(statistics.median((recorded[1] - bare[1]) / 1000 for bare, recorded in pairs), 2),
            "ratio": round(statistics.median(recorded[0] / bare[0] for bare, recorded in pairs), 3),
        }

    def watched(self, case: str, *, rounds: int, runs: int) -> list[float]:
        """How much longer a case takes while the watcher runs than while it is stopped (SIGSTOP), block by block; sorted."""
        watcher = _watcher()
        ratios = []
        recorded = self._sets[1]
        try:
            for turn in range(rounds):
                times = {}
                for runs_now in (True, False) if turn % 2 else (False, True):
                    os.kill(watcher, signal.SIGCONT if runs_now else signal.SIGSTOP)
                    self._block(recorded, case, 2)
                    times[runs_now] = self._block(recorded, case, runs)[0]
                ratios.append(times[True] / times[False])
        finally:
            os.kill(watcher, signal.SIGCONT)
        return sorted(ratios)

    @staticmethod
    def _block(pipes: list[Connection], case: str, runs: int) -> tuple[float, float]:
        for pipe in pipes:
            pipe.send((case, runs))
        answers = [pipe.recv() for pipe in pipes]
        return max(wall for wall, _ in answers), max(cpu for _, cpu in answers)


@contextmanager
def pair(backend: str, world_size: int, prepare: Prepare) -> Iterator[Pair]:
    """Start both sets; end them afterwards. The fake backend has one real process, whatever the world size."""
    context = multiprocessing.get_context("spawn")
    processes, sets = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="commlens-bench-") as folder:
        for box_dir in (None, folder):
            port, pipes = _free_port(), []
            for rank in range(1 if backend == "fake" else world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_member, args=(rank, world_size, backend, port, box_dir, prepare, theirs), daemon=True)
                process.start()
                processes.append(process)
                pipes.append(ours)
            sets.append(pipes)
        try:
            yield Pair(sets)
        finally:
            for pipe in (pipe for pipes in sets for pipe in pipes):
                pipe.send(None)
            for process in processes:
                process.join(20)
                process.kill()


def _watcher() -> int:
    """The pid of the recorded set's watcher."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"commlens.watch" in line and b"/commlens-bench-" in line:
                return int(process.name)
    raise RuntimeError("The recorded job has no watcher.")


def machine() -> str:
    """What the figures were measured on, in a line."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
