"""The checks of gpu_check.py that run the scenarios of ``commlens demo`` and random programs of the
soak over NCCL, on tensors of the GPU, and compare each verdict with the truth.

All ranks of a job share the GPU (_gpu_cuda.py), and a few jobs run at a time. As a program, this
runs the jobs and writes a line of JSON for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _gpu_checks import Bench, Check, Finds, Judged, NoResultError

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "integration"))
SECONDS = 190.0
AT_ONCE = 4  # a hung job occupies its share of the GPU
JOB_S = 40.0
END_S = 12.0  # how long a job may take to end when its time is over
STALL_S = {"fault": 8.0, "healthy": 8.0, "waits": 3.0, "soak": 8.0}
"""Sixteen ranks make communicators on one GPU at a time, which takes five seconds."""
SOAK_JOBS = {"fault": 15, "none": 6, "start": 3}
FIRST_SEED = 1

# the zygote keeps no variables of commlens
PASSED_ON = ("NCCL_LIKE", "COMMLENS_NATIVE_DIR", "COMMLENS_AUTO_BUILD")

LEFT_OUT = {
    "throttled": "its work would be on the device, not on the CPU that is throttled",
    "slow-compilation": "it compiles for the device, which needs Triton",
    "healthy-async": "its ranks make communicators in another order each, which hangs over NCCL",
    "healthy-tensor-parallel": "what moves its tensors to the device makes some plain ones",
}
FOUR_RANKS = (
    "skip-then-other",
    "uneven-then-barrier",
    "ddp-skip-backward",
    "swap-two-groups",
    "batched-p2p-missing",
    "pipeline-lost-send",
    "fsdp2-forward-order",
    "healthy-pipeline",
    "healthy-async",
)
"""The others run with two ranks where the scenario allows it: less waits for the GPU."""

HARMLESS = ("new-group-order", "mesh-shape")
"""NCCL makes a communicator at a group's first collective, and these groups have none: then nothing
may come of it.
"""


@dataclass(frozen=True)
class Job:
    """One job: a scenario, or the program of a seed."""

    group: str  # fault, healthy, soak
    name: str
    ranks: int
    seed: int = 0


def all_jobs(only: list[str]) -> Iterator[Job]:
    """Yield the jobs, the most telling ones first."""
    from more_scenarios import SCENARIOS

    chosen = [
        Job(
            "healthy" if scenario.fault is None else "fault",
            scenario.name,
            2 if 2 in scenario.worlds and scenario.name not in FOUR_RANKS else 4,
        )
        for scenario in SCENARIOS
        if scenario.name not in LEFT_OUT and not scenario.impossible()
    ]
    for job in [*chosen, *soak_jobs()]:
        if not only or any(job.name.startswith(name) for name in only):
            yield job


def soak_jobs() -> Iterator[Job]:
    """Yield programs of the soak for at most four ranks that end without a signal from outside."""
    from _soak_program import NCCL_LIKE, generate

    seed, left = FIRST_SEED, dict(SOAK_JOBS)
    while any(left.values()):
        program = generate(seed, STALL_S["soak"], NCCL_LIKE)
        truth = program.truth
        kind = {"none": "none", "start": "start"}.get(truth.fault.partition(":")[0], "fault")
        if program.size <= 4 and not truth.by_runner and not truth.slow and left[kind]:
            left[kind] -= 1
            yield Job("soak", f"seed {seed}: {truth.fault}", program.size, seed)
        seed += 1


# --- in the processes that run jobs

_harness: Any = None


def harness() -> Any:
    """Return this process's harness, whose zygote has imported torch."""
    global _harness
    if _harness is None:
        from harness import Harness
        from zygote_client import Zygote

        class Lenient(Zygote):
            """Also forks where a library of this machine has started threads as it was imported."""

            def _answer(self, timeout_s: float) -> Any:
                answer = super()._answer(timeout_s)
                return {**answer, "threads": 1} if "threads" in answer else answer

        _harness = Harness(Lenient())
    return _harness


def run_job(job: Job, folder: Path, device: str, backend: str, until: float) -> Finds:
    """Run one job. Never raises."""
    global _harness
    left_s = until - time.time() - END_S
    if left_s < 10:
        return {**asdict(job), "outcome": "no time"}
    began = time.monotonic()
    try:
        finds = _run(job, folder, device, backend, min(JOB_S, left_s))
    except Exception as error:  # the next job gets a new zygote
        _harness = None
        finds = {"outcome": "broken", "words": f"{type(error).__name__}: {error}"}
        finds["output"] = output_of(folder)
    return {**asdict(job), **finds, "wall_s": round(time.monotonic() - began, 1)}


def _run(job: Job, folder: Path, device: str, backend: str, limit_s: float) -> Finds:
    jobs = harness()

    from more_scenarios import find

    from commlens.config import Settings

    (folder / "pids").mkdir(parents=True)
    environ = {
        "ZYGOTE_RUNS_FIRST": str(HERE / "_gpu_cuda.py"),
        "GPU_CHECK_DEVICE": device,
        "GPU_CHECK_BACKEND": backend,
        # How long NCCL's watchdog waits for others' dumps before it aborts: a minute by default.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl_trace_rank_"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "COMMLENS_BOX_DIR": str(folder / "boxes"),
        **{name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)},
    }
    arguments: list[str] = []
    scenario = find("healthy-plain" if job.group == "soak" else job.name)
    if job.group == "soak":
        from _soak_program import NCCL_LIKE, generate

        script = folder / "train.py"
        script.write_text(generate(job.seed, STALL_S["soak"], NCCL_LIKE).source, encoding="utf-8")
        arguments = [str(script)]
    stall_s = STALL_S["waits" if scenario.waits else job.group]
    limit_at = time.time() + limit_s
    result = jobs.run_job(
        scenario,
        job.ranks,
        folder,
        settings=Settings(stall_timeout=stall_s, box_dir=str(folder / "boxes")),
        environment=environ,
        timeout_s=limit_s,
        arguments=arguments,
    )
    # at its limit the job is killed, and the watcher may tell of that
    result.said = [(at, what) for at, what in result.said if at < limit_at]
    judge = judge_soak if job.group == "soak" else judge_scenario
    outcome, words, expected = judge(job, result)
    finds = {
        "outcome": outcome,
        "words": words,
        "expected": expected,
        "verdicts": [shown(verdict) for verdict in result.verdicts[:4]],
        "exits": result.exits,
        "timed_out": result.timed_out,
        "seconds": round(result.seconds, 1),
    }
    if outcome not in FINE:
        finds["lines"] = result.lines[-4:]
        finds["output"] = output_of(folder)
    return finds


def output_of(folder: Path) -> str:
    """Return the end of what the ranks printed."""
    parts = []
    for path in sorted(folder.glob("rank*.out")):
        parts.append(f"--- {path.stem}\n{path.read_text(errors='replace')[-700:]}")
    return "\n".join(parts)


def shown(verdict: Any) -> Finds:
    """Return a verdict's facts."""
    collective = verdict.collective
    return {
        "kind": verdict.kind,
        "why": verdict.why,
        "culprits": verdict.culprits,
        "victims": verdict.victims,
        "confidence": verdict.confidence,
        "op": collective.op if collective else None,
        "line": verdict.source,
        "summary": verdict.summary[:400],
    }


def judge_scenario(job: Job, result: Any) -> tuple[str, str, Any]:
    """Return the outcome, how it differs from the truth, and the truth."""
    from more_scenarios import find

    from commlens.commands.demo import differences

    truth = find(job.name).truth(job.ranks)
    expected = {"kinds": truth.kinds, "whys": truth.whys, "culprits": truth.culprits}
    expected |= {"ops": truth.ops, "lines": truth.lines}
    faults = [verdict for verdict in result.verdicts if verdict.is_fault]
    ended_well = not result.timed_out and not any(result.exits.values())
    if job.group == "healthy":
        if faults:
            return "false word", "; ".join(verdict.summary for verdict in faults)[:300], expected
        ended = "timed out" if result.timed_out else f"exits {result.exits}"
        return ("right", "", expected) if ended_well else ("ended badly", ended, expected)
    if not faults:
        if job.name in HARMLESS and ended_well:
            return "no effect", "", expected
        how = "timed out" if result.timed_out else f"exits {result.exits}"
        return "silence", f"no verdict, {how}", expected
    wrong = differences(faults[-1], truth)
    first = differences(faults[0], truth)
    if wrong:
        return "differs", "; ".join(wrong), expected
    return ("first differs", "; ".join(first), expected) if first else ("right", "", expected)


def judge_soak(job: Job, result: Any) -> tuple[str, str, Any]:
    """Judge as the soak does."""
    from _soak_job import Outcome, Setting, judge
    from _soak_program import NCCL_LIKE, generate

    program = generate(job.seed, STALL_S["soak"], NCCL_LIKE)
    statuses = [abs(status) for status in result.exits.values()]
    outcome = Outcome(
        program,
        Setting("harness", STALL_S["soak"], {}),
        verdicts=[json.loads(verdict.to_json()) for verdict in result.verdicts],
        text="\n".join(result.outputs.values()),
        exit_status=None if result.timed_out else max(statuses),
    )
    judged, why = judge(program.truth, outcome, None)
    is_healthy = program.truth.fault == "none"
    if is_healthy and judged == "right" and (result.timed_out or any(statuses)):
        judged, why = "ended badly", f"exits {result.exits}, timed out: {result.timed_out}"
    return judged, why, {**asdict(program.truth), "pieces": program.pieces}


FINE = ("right", "undecided", "no effect")


def main() -> None:
    """Run all jobs, a few at a time, and write each result as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    until = time.time() + given.seconds
    spawn = multiprocessing.get_context("spawn")
    with (
        given.json.open("w", encoding="utf-8") as out,
        ProcessPoolExecutor(given.at_once, mp_context=spawn) as pool,
    ):
        running = {
            pool.submit(
                run_job, job, given.folder / str(number), given.device, given.backend, until
            ): job
            for number, job in enumerate(all_jobs(given.only))
        }
        for done in as_completed(running):
            error = done.exception()
            broken = {**asdict(running[done]), "outcome": "broken", "words": repr(error)}
            out.write(json.dumps(broken if error else done.result()) + "\n")
            out.flush()


# --- the checks


def rows(bench: Bench) -> list[Finds]:
    """Return the results of all jobs, which the first check of the lane runs."""
    found = bench.scratch / "scenarios.jsonl"
    if not found.exists():
        seconds = min(SECONDS, bench.limit_s - 10)
        ended = bench.processes.run(
            [
                *[sys.executable, "-W", "ignore", str(HERE / "_gpu_scenarios.py")],
                *["--device", bench.device, "--backend", bench.backend],
                *["--seconds", str(seconds), "--folder", str(bench.folder())],
                *["--json", str(found)],
                *(["--only", "healthy-plain", "skip-then-other"] if bench.quick else []),
            ],
            bench.limit_s,
        )
        if ended.status != 0 and (not found.exists() or not found.stat().st_size):
            raise NoResultError(ended.reason, hung=ended.status is None)
    with contextlib.suppress(ValueError):
        return [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    raise NoResultError("a result was cut off")


def measure(group: str) -> Callable[[Bench], Finds]:
    """Return the check of one group of jobs."""

    def check(bench: Bench) -> Finds:
        left_out = LEFT_OUT if group != "soak" else {}
        return {"jobs": [row for row in rows(bench) if row["group"] == group], "out": left_out}

    return check


def judge_jobs(finds: Finds) -> Judged:
    """Return how many are as expected, and name the others."""
    ran = [row for row in finds["jobs"] if row["outcome"] != "no time"]
    bad = [row for row in ran if row["outcome"] not in FINE]
    words = f"{len(ran) - len(bad)} of {len(ran)} as expected"
    if len(ran) < len(finds["jobs"]):
        words += f", {len(finds['jobs']) - len(ran)} had no time"
    told = [f"{row['name']} ({row['ranks']} ranks): {row['outcome']}" for row in bad]
    return bool(ran) and not bad, "; ".join([words, *told])


LANE = "scenarios"
CHECKS = [
    Check(
        "scenarios",
        "The scenarios of commlens demo get their verdicts over NCCL",
        SECONDS + 15,
        measure("fault"),
        judge_jobs,
        LANE,
    ),
    Check(
        "scenarios, healthy",
        "The healthy scenarios get no verdict over NCCL, and end well",
        30,
        measure("healthy"),
        judge_jobs,
        LANE,
    ),
    Check(
        "scenarios, soak",
        "Random programs get the verdict of their fault over NCCL",
        30,
        measure("soak"),
        judge_jobs,
        LANE,
    ),
]

if __name__ == "__main__":
    main()
