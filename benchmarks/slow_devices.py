r"""Count how often slow ranks and links are named in jobs whose hosts run ahead of their devices.

    python benchmarks/slow_devices.py [--jobs 300] [--healthy 300] [--first 0] [--slowdown 1.3]
        [--pipelines] [--nvrx]

Each job is simulated (``tests/unit/support/device_jobs.py``: who waits for whom, by arithmetic):
4 to 64 ranks, data parallel or tensor and data parallel, with or without experts, whose hosts
synchronise once a step or run up to 30 steps ahead. All times vary by 1% to 8%. After 30 s one rank's
kernels, one rank's host, the transfers of one group, or one rank's work take longer. The watcher's
own measuring reads the records every 5 s, with durations that become known every 14 s, as torch's
recorder is read. The stacks of the slow rank and another one are simulated, too.

Told are the slowdown of the job (its steps after and before the fault), whom the watcher names, and
when. A rank whose slowness does not make the job slower, because its host runs far enough ahead, is
not to be named. With ``--pipelines``, the jobs have 2 to 8 stages with 1 to 4 ranks each, which
send messages; all ranks of a stage may have more work from the beginning, and a slow link between
two stages names nobody. In healthy jobs, of which a third write a checkpoint on rank 0 now and then, nobody
is.
With ``--nvrx``, the scores of NVIDIA's straggler detection (``pip install nvidia-resiliency-ext``) are
computed for the same jobs by its own code, from the times of the ranks' kernels and of their loading of
batches after the fault began, at its thresholds of 0.75.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "unit" / "support"), str(TESTS / "unit"), str(TESTS)]

from builders import SCRIPT, START  # noqa: E402
from device_jobs import DeviceJob, Fault, PipelineJob  # noqa: E402

from commlens.diagnosis.causes.straggler import find_straggler  # noqa: E402
from commlens.model.collective import Frame  # noqa: E402
from commlens.model.ranklog import RankLog  # noqa: E402
from commlens.speed import pace  # noqa: E402
from commlens.watch.slowness import profile_seconds  # noqa: E402

BEGINS_S = 30.0
NVRX_THRESHOLD = 0.75
UNTIL_S = 110.0
SAMPLES_PER_S = 50  # of the stacks, by py-spy
KINDS = {
    "device": "slow-device",
    "host": "data-loading",
    "link": "slow-link",
    "work": "uneven-work",
}
KINDS_OF_PIPELINES = {
    "device": "slow-device",
    "host": "data-loading",
    "link": "",
    "stage": "uneven-work",
}
SLOWDOWNS = (0.03, 0.075, 0.2, 0.6)
"""Least slowdown of the job in each row of the table: about 5%, 10%, 30% and 100%."""


class Told(NamedTuple):
    """What the watcher said first of a job, and what was to be said."""

    slowdown: float
    kind: str  # of the fault; empty: healthy
    verdict: str  # "right", "wrong", "none", "group": told as a group's slower transfers
    is_kind_right: bool
    after_s: float
    details: str


def job_of(seed: int, factor: float | None, *, healthy: bool) -> DeviceJob:
    """Return the job of a seed."""
    draw = random.Random(seed)
    ranks = draw.choice([4, 8, 8, 8, 16, 16, 32, 64])
    tp = min(draw.choice([1, 1, 2, 4, 8]), ranks // 2)
    kind = draw.choice(sorted(KINDS))
    fault = Fault(
        kind, draw.randrange(ranks), factor or draw.choice([1.05, 1.1, 1.3, 1.6, 2.0]), BEGINS_S
    )
    return DeviceJob(
        ranks,
        tp=tp,
        seed=seed,
        fault=None if healthy else fault,
        jitter=draw.uniform(0.01, 0.08),
        step_s=draw.choice([0.1, 0.1, 0.2]),
        syncs=draw.random() < 0.5,
        ahead=draw.choice([1, 3, 30]),
        experts=kind == "work" or draw.random() < 0.3,
        pauses_every=draw.choice([0, 0, 500]),
    )


def pipeline_of(seed: int, factor: float | None, *, healthy: bool) -> DeviceJob:
    """Return the pipeline of a seed."""
    draw = random.Random(seed)
    stages, replicas = draw.choice([2, 4, 4, 8]), draw.choice([1, 2, 4])
    ranks = max(4, stages * replicas)
    kind = draw.choice(sorted(KINDS_OF_PIPELINES))
    fault = Fault(
        kind,
        draw.randrange(ranks),
        factor or draw.choice([1.1, 1.3, 1.6, 2.0]),
        0.0 if kind == "stage" else BEGINS_S,
    )
    return PipelineJob(
        ranks,
        seed=seed,
        fault=None if healthy else fault,
        jitter=draw.uniform(0.01, 0.08),
        step_s=draw.choice([0.2, 0.3]),
        syncs=draw.random() < 0.5,
        ahead=draw.choice([1, 3]),
        pp=stages,
        microbatches=draw.choice([4, 4, 6]),
        batched=draw.random() < 0.5,
        norm=draw.random() < 0.5,
    )


def watch(job: DeviceJob) -> Told:
    """Let the watcher's measuring follow a job, and return what it says first."""
    meter = pace.PaceMeter(START)
    paces: list[pace.Pace] = []
    steps: dict[float, int] = {}
    verdict, is_kind_right, after_s, details = "none", False, 0.0, ""
    fault = job.fault
    for now_s, logs in job.looks(UNTIL_S):
        steps[now_s] = job.step
        if verdict != "none":
            continue
        new = meter.measure(logs, 2, 5.0)
        paces += new
        slow = pace.find_slow_ranks(pace.recent(paces)) if new else None
        if slow is not None and pace.find_periodic_waits(slow, logs) is not None:
            slow = None
        slower = meter.transfers.slower() if new else None
        if slow is not None:
            slow = pace.with_since(slow, paces)
            why = why_of(job, slow, logs)
            kinds = KINDS_OF_PIPELINES if isinstance(job, PipelineJob) else KINDS
            is_kind_right = fault is not None and why == kinds[fault.kind]
            verdict = "right" if slow.ranks == expected(job) else "wrong"
            after_s = now_s - (fault.begins_s if fault else BEGINS_S)
            details = f"{slow.ranks} {why} {slow.cost:.0%}"
        elif slower is not None and slower.share > pace.MIN_COST_ON_DEVICE:
            members = sorted(slower.group.ranks)
            is_right = fault is not None and fault.kind == "link" and fault.rank in members
            verdict, is_kind_right = ("group" if is_right else "wrong"), is_right
            after_s, details = now_s - BEGINS_S, f"{members} {slower.kind.op} {slower.share:.0%}"
    before, after = (
        steps[BEGINS_S] - steps[10.0],
        (steps[max(steps)] - steps[BEGINS_S + 10]) / (max(steps) - BEGINS_S - 10) * (BEGINS_S - 10),
    )
    return Told(
        before / after - 1, fault.kind if fault else "", verdict, is_kind_right, after_s, details
    )


def expected(job: DeviceJob) -> list[int]:
    """Return the ranks that are to be named."""
    if job.fault is None:
        return []
    if isinstance(job, PipelineJob):
        return {"link": [], "stage": job.ranks_like(job.fault.rank)}.get(
            job.fault.kind, [job.fault.rank]
        )
    if job.fault.kind != "link":
        return [job.fault.rank]
    first = job.fault.rank // job.tp * job.tp
    return list(range(first, first + job.tp))


def why_of(job: DeviceJob, slow: pace.SlowRanks, logs: Sequence[RankLog]) -> str:
    """Return the kind of slowness that the diagnosis finds, with simulated samples of stacks."""
    load, wait = Frame(SCRIPT, 12, "load_batch"), Frame(SCRIPT, 40, "synchronize")
    sampled = random.Random(job.seed)
    other = next(rank for rank in range(job.ranks) if rank not in slow.ranks)
    profiles = {}
    for rank in (slow.ranks[0], other):
        share = job.load_s / job.step_s
        if job.fault is not None and job.fault.kind == "host" and rank == job.fault.rank:
            share = (share + job.fault.factor - 1) / job.fault.factor
        samples = SAMPLES_PER_S * profile_seconds(slow.cost)
        hits = sum(sampled.random() < share for _ in range(samples))
        profiles[rank] = Counter({(load,): hits, (wait,): samples - hits})
    why = find_straggler(slow, logs, profiles, range(job.ranks)).cause.why
    return "data-loading" if why == "user-code" else str(why)


def judge_by_nvrx(job: DeviceJob) -> str:
    """Return whether NVIDIA's detection names the right rank alone: "right", "wrong", "none"."""
    from nvidia_resiliency_ext.straggler.reporting import ReportGenerator, Statistic

    times: dict[str, list[np.ndarray]] = {"kernels": [], "load_batch": []}
    job.timed = times
    for now_s, _ in job.looks(UNTIL_S):
        if now_s <= BEGINS_S:
            for each in times.values():
                each.clear()
    named: set[int] = set()
    generator = ReportGenerator.__new__(ReportGenerator)  # its rules, without a process group
    medians = {name: np.median(np.stack(each), axis=0) for name, each in times.items()}
    means = {name: np.mean(np.stack(each), axis=0) for name, each in times.items()}
    reference = {name: float(each.min()) for name, each in medians.items()}
    for rank in range(job.ranks):
        summaries = {
            name: {
                Statistic.MED: medians[name][rank],
                Statistic.AVG: means[name][rank],
                Statistic.NUM: len(times[name]),
            }
            for name in times
        }
        kernels = {"kernels": summaries["kernels"]}
        section = {"load_batch": summaries["load_batch"]}
        scores = [
            generator._compute_gpu_perf_score(kernels, reference),
            *generator._compute_sections_perf_scores(section, reference).values(),
        ]
        if min(scores) < NVRX_THRESHOLD:
            named.add(rank)
    return ("right" if sorted(named) == expected(job) else "wrong") if named else "none"


def compare_with_nvrx(seeds: range, make: Callable[..., DeviceJob], factor: float | None) -> None:
    """Print what NVIDIA's detection says of the jobs, by the kind of fault, and of healthy ones."""
    said: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in seeds:
        job = make(seed, factor, healthy=False)
        said[job.fault.kind if job.fault else ""][judge_by_nvrx(job)] += 1
        said["healthy"][judge_by_nvrx(make(seed + 1_000_000, None, healthy=True))] += 1
    for kind, counts in sorted(said.items()):
        print(f"{kind}: {dict(counts)}")


def main() -> None:
    """Run the jobs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--healthy", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--pipelines", action="store_true", help="jobs whose ranks send messages")
    parser.add_argument("--nvrx", action="store_true", help="judge by NVIDIA's detection instead")
    parser.add_argument("--slowdown", type=float, help="the factor of all faults")
    options = parser.parse_args()
    make = pipeline_of if options.pipelines else job_of
    if options.nvrx:
        seeds = range(options.first, options.first + options.jobs)
        compare_with_nvrx(seeds, make, options.slowdown)
        return
    rows: dict[float, list[Told]] = defaultdict(list)
    hidden: list[Told] = []
    for seed in range(options.first, options.first + options.jobs):
        told = watch(make(seed, options.slowdown, healthy=False))
        row = max((each for each in SLOWDOWNS if told.slowdown >= each), default=0.0)
        (rows[row] if row else hidden).append(told)
        is_missed = told.verdict == "none" and row > SLOWDOWNS[0]
        if told.verdict == "wrong" or is_missed or (told.details and not told.is_kind_right):
            print(f"seed {seed}: {told}", flush=True)
    print(
        "| job slower by | jobs | right | group's transfers | not told | wrong | kind right |"
        " median s after it began |\n|---|---|---|---|---|---|---|---|"
    )
    for row in SLOWDOWNS:
        said = Counter(each.verdict for each in rows[row])
        times = [each.after_s for each in rows[row] if each.verdict in ("right", "group")]
        kinds = sum(each.is_kind_right for each in rows[row])
        print(
            f"| {row:.0%} or more | {len(rows[row])} | {said['right']} | {said['group']} |"
            f" {said['none']} | {said['wrong']} | {kinds} | {median(times or [0]):.0f} |"
        )
    print(f"not slower (below {SLOWDOWNS[0]:.0%}):", Counter(each.verdict for each in hidden))
    first = options.first + 1_000_000
    healthy = Counter()
    for seed in range(first, first + options.healthy):
        told = watch(make(seed, None, healthy=True))
        healthy[told.verdict] += 1
        if told.verdict != "none":
            print(f"healthy seed {seed}: {told}", flush=True)
    print("healthy:", healthy)


if __name__ == "__main__":
    main()
