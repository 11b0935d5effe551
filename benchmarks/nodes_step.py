"""The step time of a job over two emulated nodes, recorded and watched, against the same job
without commlens.

Both jobs run at the same time, each on two nodes of its own with one rank each, so that both meet
the same load of the machine. The steps that ended in the same second are a pair. The result is the
median of the pairs' ratios with a bootstrap interval, over all rounds; the CPU time of the ranks is
compared, too. Needs root, for network namespaces.

    python benchmarks/nodes_step.py [--rounds 3] [--seconds 60] [--write]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from _report import machine, write_section

from commlens import native

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from emulated_nodes import PORT, Node, nodes, wait

PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data, ends, until = torch.randn(64, 256), [], time.monotonic() + float(sys.argv[1])
more = torch.ones(1)
while more.item():
    optimizer.zero_grad()
    model(data).sum().backward()
    optimizer.step()
    more[0] = time.monotonic() < until
    dist.broadcast(more, 0)
    ends.append(time.monotonic())
used = os.times()
json.dump({"ends": ends, "cpu": (used.user + used.system) / len(ends)}, open(sys.argv[2] + os.environ["RANK"], "w"))
dist.destroy_process_group()
"""


def start(made: list[Node], watched: bool, program: Path, seconds: float, output: Path) -> None:
    """Start one job."""
    launcher = ["commlens", "launch"] if watched else ["torch.distributed.run"]
    for node in made:
        node.start(
            [
                sys.executable,
                "-m",
                *launcher,
                "--nnodes=2",
                f"--node-rank={made.index(node)}",
                "--nproc-per-node=1",
                f"--master-addr={made[0].address}",
                f"--master-port={PORT}",
                str(program),
                str(seconds),
                str(output),
            ],
            {"COMMLENS_DUMP_DIR": str(node.folder / "dump")},
        )


def steps_by_second(ends: list[float]) -> dict[int, list[float]]:
    """Return the step times by the second in which the steps ended, without the first five seconds."""
    found: dict[int, list[float]] = defaultdict(list)
    for before, end in itertools.pairwise(ends):
        if end > ends[0] + 5:
            found[int(end)].append(end - before)
    return found


def one_round(seconds: float, watched_first: bool) -> tuple[list[float], list[float], float]:
    """Return the ratios of the pairs, the bare step times, and the ratio of the ranks' CPU time a
    step.
    """
    with tempfile.TemporaryDirectory() as name, nodes(4, Path(name)) as made:
        program = Path(name) / "train.py"
        program.write_text(PROGRAM)
        jobs = (
            {True: made[:2], False: made[2:]}
            if watched_first
            else {False: made[:2], True: made[2:]}
        )
        for watched, some in jobs.items():
            start(some, watched, program, seconds, Path(name) / f"{watched}")
        wait(made, seconds + 120)
        told: dict[bool, list[Any]] = {}
        for watched in jobs:
            files = [Path(name) / f"{watched}{rank}" for rank in (0, 1)]
            assert all(file.exists() for file in files), made[0].output + made[2].output
            told[watched] = [json.loads(file.read_text()) for file in files]
        bare, watched_steps = (
            steps_by_second(told[False][0]["ends"]),
            steps_by_second(told[True][0]["ends"]),
        )
        ratios = [
            statistics.mean(watched_steps[at]) / statistics.mean(bare[at])
            for at in sorted(bare)
            if watched_steps.get(at)
        ]
        cpu = sum(each["cpu"] for each in told[True]) / sum(each["cpu"] for each in told[False])
        return ratios, [step for several in bare.values() for step in several], cpu


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    """Measure, print, and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--write", action="store_true", help="write the figure into docs/nodes.md")
    asked = parser.parse_args()
    rounds = [one_round(asked.seconds, number % 2 == 0) for number in range(asked.rounds)]
    ratios = [ratio for each in rounds for ratio in each[0]]
    bare = statistics.median(step for each in rounds for step in each[1])
    low, high = interval(ratios)
    cpu = ", ".join(f"{each[2]:.3f}" for each in rounds)
    engine = "Python" if native.load() is None else "native"
    text = (
        f"With the {engine} engine, a step of {1000 * bare:.0f} ms takes"
        f" {statistics.median(ratios):.3f} times as long when recorded and watched (95% interval"
        f" {low:.3f} to {high:.3f}, {len(ratios)} pairs of one second in {len(rounds)} rounds). The"
        f" ranks' CPU time a step, by round: {cpu} times.\n{machine()}"
    )
    print(text)
    if asked.write:
        write_section(
            Path(__file__).resolve().parents[1] / "docs" / "nodes.md",
            f"step, {engine} engine",
            text,
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
