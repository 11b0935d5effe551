"""Run random training programs without a fault under ``--check-numbers``, and count what commlens
says about them: ``python benchmarks/numbers_soak.py --jobs 100 --first 0``.

One process imports torch; the ranks of all jobs are forked from it. A job with a word keeps its
folder. ``--seed 17`` runs one job and prints all that it printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "integration")]

from _numbers_program import WAYS, Recipe, draw, train  # noqa: E402
from listening import listen  # noqa: E402
from verify_forked import Job, Jobs, init, prepare, write  # noqa: E402

JOB_TIMEOUT_S = 240.0
AT_A_TIME = 20  # jobs between two lines of progress


def run(rank: int, size: int, result: Path, recipe: Recipe) -> None:
    """Run a recipe, and write what was said of it and how much was compared."""
    from commlens.numbers import checks
    from commlens.numbers.comparison import TensorComparison

    lines = listen().lines
    compared: list[int] = []

    compare = TensorComparison.compare

    def count(self: TensorComparison, check: Any, reports: Any, parts: Any) -> Any:
        compared.append(sum(len(part.by_key()) for part in parts))
        return compare(self, check, reports, parts)

    TensorComparison.compare = count  # type: ignore[method-assign]
    os.chdir(result.parent)
    init(result.parent, rank, size, 60.0)
    train(recipe)
    dist.barrier()
    dist.destroy_process_group()
    checks.finish()
    write(result, {"lines": lines, "checks": len(compared), "tensors": sum(compared)})


def job_of(seed: int) -> Job:
    """Return the job of a seed."""
    recipe = draw(seed)

    def body(rank: int, size: int, result: Path) -> None:
        run(rank, size, result, recipe)

    settings = {"debug": False, "check_numbers": recipe.checks, "engine": "python"}
    return Job(str(seed), recipe.size, body, settings, timeout_s=JOB_TIMEOUT_S, nodes=recipe.nodes)


def outcome_of(folder: Path, recipe: Recipe) -> tuple[str, list[str], int, int]:
    """Return the outcome of a job, what was said, and the numbers of checks and tensors."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]
    lines = [line for record in records for line in record["lines"]]
    checks, tensors = (sum(record[what] for record in records) for what in ("checks", "tensors"))
    if lines:
        return "word", lines, checks, tensors
    if len(records) < recipe.size:
        return "broken", [], checks, tensors
    return "silent", [], checks, tensors


def main() -> int:
    """Run the jobs, print the counts, and return 1 if anything was said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone, and print its output")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument(
        "--ways",
        default=",".join(WAYS),
        help="the ways to train, with commas; seeds that draw another one are left out",
    )
    parser.add_argument("--keep", type=Path, default=Path("numbers-soak"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import commlens.numbers.sampling  # noqa: F401 - once, before the forks

    is_one = arguments.seed is not None
    first, number = (arguments.seed, 1) if is_one else (arguments.first, arguments.jobs)
    ways = arguments.ways.split(",")
    seeds = (seed for seed in itertools.count(first) if draw(seed).how in ways)
    jobs = [job_of(seed) for seed in itertools.islice(seeds, number)]
    prepare()
    counts: Counter[str] = Counter()
    by_way: Counter[tuple[str, str]] = Counter()
    checks = tensors = 0
    for begin in range(0, len(jobs), AT_A_TIME):
        some = jobs[begin : begin + AT_A_TIME]
        for job in some:
            shutil.rmtree(arguments.keep / job.name, ignore_errors=True)
        Jobs(arguments.keep).run(some, arguments.at_once)
        for job in some:
            folder, recipe = arguments.keep / job.name, draw(int(job.name))
            outcome, lines, more_checks, more_tensors = outcome_of(folder, recipe)
            counts[outcome] += 1
            by_way[recipe.how, outcome] += 1
            checks, tensors = checks + more_checks, tensors + more_tensors
            if outcome != "silent":
                print(f"{outcome}: {recipe}", *lines, sep="\n    ", flush=True)
            if outcome == "silent":
                shutil.rmtree(folder)
            elif is_one or outcome == "broken":
                for path in sorted(folder.glob("*.out"))[: recipe.size if is_one else 1]:
                    print(path.read_text()[-3000 if is_one else -400 :])
        print(f"{sum(counts.values())} jobs: {dict(counts)}, {checks} checks", flush=True)
    for how in WAYS:
        print(f"{how:16}", *(f"{by_way[how, word]:5} {word}" for word in sorted(counts)))
    print(f"{sum(counts.values())} jobs {dict(counts)}; {checks} checks of {tensors} tensors")
    return 1 if counts["word"] else 0


if __name__ == "__main__":
    sys.exit(main())
