"""Measure what tracing and PyTorch's CommDebugMode add to a step of tensor-parallel models, in
turns in one process on the fake backend.

python benchmarks/comm_debug_cost.py [--rounds 40] [--world-size 4]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from _report import machine
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from commlens import CommDebugMode, native
from commlens.model.trace import Depth
from commlens.tracing.tracer import Tracer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from models import parallel_mlp, parallel_transformer

Step = Callable[[], object]
TRACES = ("commlens collectives", "commlens ops")


def tracing(depth: Depth) -> Callable[[], AbstractContextManager[Tracer]]:
    """Trace one of many steps as ``commlens.trace(depth=...)`` does: all steps share one tracer."""
    tracer = Tracer(depth)

    @contextmanager
    def running() -> Iterator[Tracer]:
        tracer.start()
        try:
            yield tracer
        finally:
            tracer.stop()

    return running


WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bare": nullcontext,
    "commlens collectives": tracing(Depth.COLLECTIVES),
    "commlens ops": tracing(Depth.OPS),
    "commlens.CommDebugMode": CommDebugMode,
    "torch CommDebugMode": TorchCommDebugMode,
}
"""Ways to run a step.

A trace covers several steps, of which the first, which reads each stack for the first time, is not
measured; the step's share of turning ops into records is. Both CommDebugModes are made anew for
each step, because PyTorch's does not survive two steps in one context.
"""


def steps(mesh: DeviceMesh) -> dict[str, Step]:
    """Return a forward and backward pass of each model."""
    mlp, x = parallel_mlp(mesh), torch.rand(8, 10)
    small, tokens = (
        parallel_transformer(mesh, width=64, vocabulary=64, length=32),
        torch.randint(0, 64, (4, 32)),
    )
    large = parallel_transformer(mesh, width=256, vocabulary=512, length=64, layers=4)
    more_tokens = torch.randint(0, 512, (8, 64))
    return {
        "MLP": lambda: mlp(x).sum().backward(),
        "transformer, 2 layers of 64": lambda: small(tokens).sum().backward(),
        "transformer, 4 layers of 256": lambda: large(more_tokens).sum().backward(),
    }


def measure(step: Step, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU milliseconds of a step for each way and round. The ways take turns,
    starting with a different one each time.
    """
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    order = list(WAYS)
    for number in range(rounds + 3):
        for way in order[number % len(order) :] + order[: number % len(order)]:
            with WAYS[way]() as running:
                ops = running.ops if isinstance(running, Tracer) else None
                if way in TRACES:
                    step()
                if ops is not None:
                    ops.records()
                cpu, wall = time.process_time_ns(), time.perf_counter_ns()
                step()
                if ops is not None:
                    ops.records()  # in a longer trace, this is done every ten thousand ops
                wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
            if number >= 3:
                times[way].append((wall / 1e6, cpu / 1e6))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure what tracing and PyTorch's CommDebugMode add to a step."
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--world-size", type=int, default=4)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=arguments.world_size)
    frames = (
        "in C++" if native.load() is not None else "in Python, since the native engine is not built"
    )
    print(
        f"one step, medians of {arguments.rounds} rounds in which the ways take turns; frames are"
        f" read {frames}; {machine()}"
    )
    for name, step in steps(init_device_mesh("cpu", (arguments.world_size,))).items():
        times = measure(step, arguments.rounds)
        bare = times["bare"]
        theirs = [
            statistics.median(
                t[i] - b[i] for t, b in zip(times["torch CommDebugMode"], bare, strict=True)
            )
            for i in (0, 1)
        ]
        print(f"\n{name}\n{'':26}{'wall':>20}{'CPU':>20}   added, of what torch's adds")
        for way, found in times.items():
            medians = [statistics.median(t[i] for t in found) for i in (0, 1)]
            added = [
                statistics.median(t[i] - b[i] for t, b in zip(found, bare, strict=True))
                for i in (0, 1)
            ]
            ratios = [
                statistics.median(t[i] / b[i] for t, b in zip(found, bare, strict=True))
                for i in (0, 1)
            ]
            columns = "".join(
                f"{ms:10.2f} ms x{ratio:5.2f}" for ms, ratio in zip(medians, ratios, strict=True)
            )
            print(
                f"  {way:24}{columns}   {added[0]:+7.2f} ms {added[0] / theirs[0]:5.2f} (CPU"
                f" {added[1] / theirs[1]:.2f})"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
