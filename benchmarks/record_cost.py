"""What recording adds to one collective, in microseconds.

Two sets of processes run the same loop, one bare and one recorded and watched, in turns: first a block here, then a block
there. The figure is the median over blocks of the difference between neighbours, so that a machine that slows down slows both.

    python benchmarks/record_cost.py [--rounds 30] [--ops 500] [--backends fake:4,gloo:2]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from _pairs import machine, pair

CASES = ("all_reduce", "all_reduce async", "broadcast", "all_gather_into_tensor", "send/recv", "torch.add")
DEPTH = 5
"""Python frames between the program's start and the collective, as a small training script has."""


def prepare(rank: int, world_size: int) -> dict[str, Callable[[], object]]:
    """The cases, for one rank."""
    import torch
    import torch.distributed as dist

    tensor, gathered, other = torch.ones(8), torch.zeros(8 * world_size), torch.ones(8)

    def from_a_script(run: Callable[[], object], levels: int = DEPTH) -> object:
        return from_a_script(run, levels - 1) if levels else run()

    return {
        "all_reduce": lambda: from_a_script(lambda: dist.all_reduce(tensor)),
        "all_reduce async": lambda: from_a_script(lambda: dist.all_reduce(tensor, async_op=True).wait()),
        "broadcast": lambda: from_a_script(lambda: dist.broadcast(tensor, 0)),
        "all_gather_into_tensor": lambda: from_a_script(lambda: dist.all_gather_into_tensor(gathered, tensor)),
        "send/recv": lambda: from_a_script(lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)),
        "torch.add": lambda: torch.add(tensor, other),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What recording adds to one collective, in microseconds.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ops", type=int, default=500)
    parser.add_argument("--backends", default="fake:4,gloo:2")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for item in arguments.backends.split(","):
        backend, _, size = item.partition(":")
        with pair(backend, int(size), prepare) as both:
            for case in CASES:
                if not (backend == "fake" and case == "send/recv"):
                    measured = both.compare(case, rounds=arguments.rounds, runs=arguments.ops)
                    results.append({"backend": f"{backend} x{size}", **measured})
    if arguments.json:
        print(json.dumps({"machine": machine(), "results": results}, indent=2))
        return
    print(f"us for one op, medians of {arguments.rounds} pairs of blocks of {arguments.ops}; {machine()}")
    print(f"{'backend':9} {'case':24} {'bare':>8} {'added':>8}   {'quartiles':>18} {'added CPU':>10}")
    for row in results:
        low, high = row["added_us_quartiles"]
        spread = f"{low:.2f} to {high:.2f}"
        print(
            f"{row['backend']:9} {row['case']:24} {row['bare_us']:8.2f} {row['added_us']:8.2f}   {spread:>18} {row['added_cpu_us']:10.2f}"
        )


if __name__ == "__main__":
    main()
