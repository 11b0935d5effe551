"""What recording adds to one collective, in microseconds.

Two sets of processes run the same loop, one bare and one recorded, in turns: first a block here, then a block there. The
figure is the median over blocks of the difference between neighbours, so that a machine that slows down slows both.

    python benchmarks/record_cost.py [--rounds 30] [--ops 500]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

CASES = ("all_reduce", "all_reduce async", "broadcast", "all_gather_into_tensor", "send/recv", "torch.add")


def member(rank: int, world_size: int, backend: str, port: int, recorded: bool, box_dir: str, depth: int, pipe: Connection) -> None:
    """One process: waits for (case, number of ops), runs them, answers with ns per op."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if recorded:
        from commlens import config
        from commlens.capture import bootstrap

        bootstrap.start(config.Settings(box_dir=box_dir, job=f"bench-{port}", watched=True))
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend)
    tensor, gathered, other = torch.ones(8), torch.zeros(8 * world_size), torch.ones(8)

    def send_recv() -> None:
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)

    cases: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(gathered, tensor),
        "send/recv": send_recv,
        "torch.add": lambda: torch.add(tensor, other),
    }

    def deep(levels: int, run: Any, count: int) -> int:
        if levels:
            return deep(levels - 1, run, count)
        started = time.perf_counter_ns()
        for _ in range(count):
            run()
        return time.perf_counter_ns() - started

    while True:
        order = pipe.recv()
        if order is None:
            break
        case, count = order
        cpu = time.process_time_ns()
        wall = deep(depth, cases[case], count)
        pipe.send((wall / count, (time.process_time_ns() - cpu) / count))
    dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(backend: str, world_size: int, recorded: bool, box_dir: str, depth: int) -> tuple[list[Any], list[Connection]]:
    """Start one set of processes."""
    context = multiprocessing.get_context("spawn")
    port, processes, pipes = free_port(), [], []
    for rank in range(world_size if backend != "fake" else 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=member, args=(rank, world_size, backend, port, recorded, box_dir, depth, theirs), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


def block(pipes: list[Connection], case: str, count: int) -> tuple[float, float]:
    """Let a set run a block; the slowest member's (wall, CPU) ns per op."""
    for pipe in pipes:
        pipe.send((case, count))
    answers = [pipe.recv() for pipe in pipes]
    return max(wall for wall, _ in answers), max(cpu for _, cpu in answers)


def measure(backend: str, world_size: int, rounds: int, ops: int, depth: int) -> list[dict[str, Any]]:
    """All cases of one backend."""
    results = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="commlens-bench-") as box_dir:
        bare_processes, bare = start(backend, world_size, False, box_dir, depth)
        recorded_processes, recorded = start(backend, world_size, True, box_dir, depth)
        for case in CASES:
            if backend == "fake" and case == "send/recv":
                continue
            block(bare, case, ops), block(recorded, case, ops)
            pairs = [(block(bare, case, ops), block(recorded, case, ops)) for _ in range(rounds)]
            walls = sorted((b[0] - a[0]) / 1000 for a, b in pairs)
            cpus = [(b[1] - a[1]) / 1000 for a, b in pairs]
            base = statistics.median(a[0] for a, _ in pairs) / 1000
            results.append(
                {
                    "backend": f"{backend} x{world_size}",
                    "case": case,
                    "bare_us": round(base, 2),
                    "added_us": round(statistics.median(walls), 2),
                    "added_us_quartiles": [round(walls[len(walls) // 4], 2), round(walls[3 * len(walls) // 4], 2)],
                    "added_cpu_us": round(statistics.median(cpus), 2),
                }
            )
        for pipe in [*bare, *recorded]:
            pipe.send(None)
        for process in [*bare_processes, *recorded_processes]:
            process.join(20)
            process.kill()
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ops", type=int, default=500)
    parser.add_argument("--depth", type=int, default=5, help="Python frames between the program's start and the collective")
    parser.add_argument("--backends", default="fake:4,gloo:2")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for item in arguments.backends.split(","):
        backend, _, size = item.partition(":")
        results += measure(backend, int(size), arguments.rounds, arguments.ops, arguments.depth)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; us per op, medians")
    print(f"{'backend':9} {'case':24} {'bare':>8} {'added':>8}   {'quartiles':>16} {'added CPU':>10}")
    for row in results:
        low, high = row["added_us_quartiles"]
        added = f"{row['added_us']:8.2f}   {low:7.2f} to {high:5.2f} {row['added_cpu_us']:10.2f}"
        print(f"{row['backend']:9} {row['case']:24} {row['bare_us']:8.2f} {added}")


if __name__ == "__main__":
    main()
