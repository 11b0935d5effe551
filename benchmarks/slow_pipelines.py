r"""Count how often slow ranks of pipelines of real processes are named, and healthy ones accused.

    python benchmarks/slow_pipelines.py [--slow 10] [--healthy 5] [--first 0] [--at-once 5] [--seconds 150]

Each job is a pipeline of 2 to 4 stages, one process each, on the backend that behaves as NCCL does
(``tests/nccl_like``), under ``commlens launch --timing``. A stage receives, works and sends, for four
microbatches forward and four backward, in batches or one by one; then all ranks reduce the norm of
their gradients. After a third of its time, the kernels of one stage or the work of
one host begin to take longer, by 50% to 100% of a step. All times vary by 5%.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import nccl_like  # noqa: E402

TRAIN = """
import random, sys, time
import nccl_like
import torch
import torch.distributed as dist

kind, slow, factor, batched, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "1", float(sys.argv[5])
FORWARD, BACKWARD, PARTS = 0.010, 0.020, 4

def load_batch(late):
    time.sleep(0.004 * random.uniform(0.95, 1.05) + late)

def compute(takes, is_slow):
    nccl_like.launch_kernel(takes * random.uniform(0.95, 1.05) * (factor if is_slow else 1))

def message(op, data, peer):
    if batched:
        for work in dist.batch_isend_irecv([dist.P2POp(op, data, peer)]):
            work.wait()
    else:
        op(data, peer).wait()

def main():
    dist.init_process_group("nccl")
    rank, last, began = dist.get_rank(), dist.get_world_size() - 1, time.monotonic()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    data, norm = torch.ones(65536), torch.ones(1)
    more = torch.zeros(1)
    while not more.item():
        is_late = rank == slow and time.monotonic() - began > seconds / 3
        load_batch((factor - 1) * PARTS * (FORWARD + BACKWARD) if is_late and kind == "host" else 0)
        for takes, before, after in ((FORWARD, rank - 1, rank + 1), (BACKWARD, rank + 1, rank - 1)):
            for _ in range(PARTS):
                if 0 <= before <= last:
                    message(dist.irecv, data, before)
                compute(takes, is_late and kind == "device")
                if 0 <= after <= last:
                    message(dist.isend, data, after)
        dist.all_reduce(norm)
        nccl_like.synchronize()
        optimizer.step()
        more.fill_(rank == 0 and time.monotonic() - began > seconds)
        dist.all_reduce(more)
        nccl_like.synchronize()
    dist.destroy_process_group()

main()
"""


class PipelineCase(NamedTuple):
    """One job."""

    seed: int
    kind: str  # "device", "host", or "none"
    stages: int
    slow: int
    factor: float
    batched: bool


def case_of(seed: int, *, healthy: bool) -> PipelineCase:
    """Draw a job."""
    draw = random.Random(seed)
    stages = draw.choice((2, 3, 4))
    kind = "none" if healthy else draw.choice(("device", "host"))
    return PipelineCase(
        seed, kind, stages, draw.randrange(stages), draw.choice((1.5, 2.0)), draw.random() < 0.5
    )


def run(case: PipelineCase, seconds: float) -> str:
    """Run a job; return what the watcher said."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        command = [
            *(sys.executable, "-m", "commlens", "launch", "--timing"),
            *(f"--nproc-per-node={case.stages}", str(script), case.kind, str(case.slow)),
            *(str(case.factor), str(int(case.batched)), str(seconds)),
        ]
        paths = [str(ROOT / "tests/nccl_like/site"), str(ROOT / "tests"), str(ROOT / "src")]
        environment = {
            "OMP_NUM_THREADS": "1",
            "NCCL_LIKE": "1",
            nccl_like.LIBRARY: str(nccl_like.build()),
            "PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds + 200,
            check=False,
            env={**os.environ, **environment},
        )
    said = re.sub(r"\s+", " ", done.stderr)
    return said if not done.returncode else f"FAILED {said[-600:]}"


def main() -> None:
    """Run all jobs and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", type=int, default=10)
    parser.add_argument("--healthy", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0)
    asked = parser.parse_args()
    cases = [case_of(asked.first + at, healthy=False) for at in range(asked.slow)]
    cases += [case_of(asked.first + 1000 + at, healthy=True) for at in range(asked.healthy)]
    with ThreadPoolExecutor(asked.at_once) as pool:
        for case, said in zip(
            cases, pool.map(lambda each: run(each, asked.seconds), cases), strict=True
        ):
            notices = re.findall(r"Ranks? [\d,-]+ makes? the job slow.{0,400}", said)
            failed = said if said.startswith("FAILED") else ""
            print(case, "->", notices or failed or "nothing", flush=True)


if __name__ == "__main__":
    main()
