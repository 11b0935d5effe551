"""What recording and watching add to a training step: DDP with a few buckets, real gloo, paired with the same job bare.

python benchmarks/step_time.py [--rounds 15] [--steps 10] [--world-size 2]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from _pairs import machine, pair


def prepare(rank: int, world_size: int) -> dict[str, Callable[[], object]]:
    """A DDP model of 8 layers; one training step of it with a small and with a larger batch."""
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    small, large = torch.randn(64, 512), torch.randn(1024, 512)
    return {"DDP, batch 64": lambda: step(small), "DDP, batch 1024": lambda: step(large)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What recording and watching add to a training step.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--world-size", type=int, default=2)
    arguments = parser.parse_args()
    print(f"a step, recorded and watched against bare, medians of {arguments.rounds} pairs of blocks; {machine()}")
    with pair("gloo", arguments.world_size, prepare) as both:
        for case in ("DDP, batch 64", "DDP, batch 1024"):
            row = both.compare(case, rounds=arguments.rounds, runs=arguments.steps)
            low, high = row["added_us_quartiles"]
            ratios = both.watched(case, rounds=arguments.rounds, runs=arguments.steps)
            print(f"{case:16} {row['bare_us'] / 1000:8.2f} ms  x{row['ratio']:.3f}  (added {low / 1000:.2f} to {high / 1000:.2f} ms)")
            middle, quarter = ratios[len(ratios) // 2], len(ratios) // 4
            spread = f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"
            print(f"{'':16} while the watcher runs, which compares all records, against it stopped: x{middle:.3f} ({spread})")


if __name__ == "__main__":
    main()
