"""Counts how often slow ranks of running jobs are named, and healthy ones accused.

    python benchmarks/slow_ranks.py [--healthy 20] [--at-once 4] [--steps 600]

Each job is DDP training on gloo whose steps compute for 40 ms. One rank is made slow by a sleep in its data loader or by work in its
forward pass, of 5, 20 and 100 ms a step; healthy jobs have none. Run it on a busy machine, too: that is where ranks are late by chance.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TRAIN = """
import random, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

where, ms, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def load_batch(slow):
    if slow and where == "data":
        time.sleep(ms / 1000)
    return torch.ones(8, 64)

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def forward(model, batch, slow):
    burn(0.004)
    time.sleep(random.uniform(0.03, 0.042))
    if slow and where == "forward":
        burn(ms / 1000)
    return model(batch).square().mean()

def main():
    dist.init_process_group("gloo")
    slow = dist.get_rank() == 1
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = forward(model, load_batch(slow), slow)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

main()
"""


class Case(NamedTuple):
    """One job."""

    ranks: int
    where: str  # "none", "data" or "forward"
    ms: int


class Outcome(NamedTuple):
    """What the watcher said of it."""

    named: list[str]  # ranks said to be slow, in order
    line: bool  # the function is named
    cost: str


def run(case: Case, steps: int) -> Outcome:
    """Run one job under the watcher."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAIN)
        command = [sys.executable, "-m", "commlens", "launch", f"--nproc-per-node={case.ranks}", "train.py"]
        done = subprocess.run(
            [*command, case.where, str(case.ms), str(steps)], cwd=folder, capture_output=True, text=True, timeout=600, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    said = re.sub(r"\s+", " ", done.stderr)
    named = re.findall(r"Ranks? ([\d,-]+) makes? the job slow", said)
    cost = re.search(r"wait for (\d+%) of the time", said)
    function = {"data": "load_batch", "forward": "burn"}.get(case.where, "")
    return Outcome(named, bool(function) and function in said, cost[1] if cost else "")


def main() -> int:
    """Run all jobs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", type=int, default=20, help="healthy jobs of each size")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    cases = [Case(ranks, "none", 0) for ranks in (2, 4) for _ in range(arguments.healthy)]
    cases += [Case(ranks, where, ms) for ranks in (2, 4) for where in ("data", "forward") for ms in (5, 20, 100)]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        outcomes = list(pool.map(lambda case: run(case, arguments.steps), cases))
    healthy = [outcome for case, outcome in zip(cases, outcomes, strict=True) if case.where == "none"]
    accused = [outcome.named for outcome in healthy if outcome.named]
    print(f"load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")
    print(f"{'ranks':>5}  {'slow in':8} {'by':>7}  named  cost  line")
    for case, outcome in zip(cases, outcomes, strict=True):
        if case.where != "none":
            line = "yes" if outcome.line else "no"
            print(f"{case.ranks:>5}  {case.where:8} {case.ms:>4} ms  {','.join(outcome.named) or '-':5}  {outcome.cost or '-':>4}  {line}")
    print(f"healthy jobs: {len(healthy)}, of which a rank was accused in: {len(accused)} {accused or ''}")
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main())
