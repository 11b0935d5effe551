"""Run random jobs of several worlds and of groups made by hand, healthy and with one fault, and
count what commlens says about them: ``python benchmarks/worlds_soak.py --jobs 120``.

Every job is a real one of 2 to 5 processes over gloo, started one by one as Ray or a server starts
them. With ``--nodes 2`` the worlds, or the ranks of an only world, are on emulated nodes: processes
of two nodes do not see each other's black boxes. A miss keeps its folder; its seed replays it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
from _gpu_jobs import free_port
from _report import counts_table, write_section
from _soak_job import NO_FAULT

from commlens.model.worlds import Worlds

PROGRAM = Path(__file__).with_name("_worlds_program.py")
DOCUMENT = Path(__file__).parents[1] / "docs" / "reliability.md"
STALL_TIMEOUT_S = 6
PATIENCE_S = 75
"""For the first verdict, or for a healthy job's end."""
IN_STEPS = ("late", "raises", "dies", "skips", "another order")
AT_CREATION = ("never joins", "wrong size", "old prefix", "stale address")
SHAPES: dict[str, tuple[str, ...]] = {
    "weight_sync": (*IN_STEPS, *AT_CREATION),
    "pairs": (*IN_STEPS, *AT_CREATION),
    "engines": (*IN_STEPS, *AT_CREATION),
    "server": ("late", "raises", "dies", "skips"),
    "quorums": (*IN_STEPS, "never joins", "wrong size", "old prefix"),
    "restart": ("late", "raises", "dies", "skips", "never joins", "old prefix"),
}
UNDECIDABLE = ("skips", "another order", "wrong size", "old prefix", "stale address")
"""Faults after which two sides stand against each other: naming nobody is right, too."""
OUTCOMES = (
    "right",
    "perhaps",
    "undecided",
    "unnamed",
    "silence",
    "wrong name",
    "false word",
    "harm",
)


@dataclass(frozen=True)
class Job:
    """One job, as its seed draws it."""

    seed: int
    shape: str
    sizes: dict[str, int]  # processes by role
    fault: str  # "none": healthy
    culprit: str  # ROLE:RANK
    step: int
    nodes: int = 1

    def node_of(self, role: str, rank: int) -> int:
        """Return the node of a process: each world has one, or the ranks of an only world do."""
        several = len(self.sizes) > 1
        return ([*self.sizes].index(role) if several else rank) % self.nodes

    def __str__(self) -> str:
        processes = " + ".join(f"{size} {role}" for role, size in self.sizes.items())
        where = "" if self.fault == "none" else f" of {self.culprit}, step {self.step}"
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"seed {self.seed}: {self.shape} of {processes}{nodes}; {self.fault}{where}"


def draw(seed: int, nodes: int = 1, shapes: Sequence[str] = tuple(SHAPES)) -> Job:
    """Return the job of a seed: an even one is healthy."""
    rng = random.Random(seed)
    shape = rng.choice(shapes)
    sizes = {
        "weight_sync": {"trainer": rng.choice([1, 2, 3]), "rollout": rng.choice([1, 2])},
        "pairs": {"job": rng.choice([3, 4])},
        "engines": {"engine": rng.choice([2, 3])},
        "server": {"worker": rng.choice([2, 3, 4])},
        "quorums": {"replica": rng.choice([2, 3])},
        "restart": {"job": rng.choice([2, 3])},
    }[shape]
    members = [f"{role}:{rank}" for role, size in sizes.items() for rank in range(size)]
    if shape == "weight_sync":  # trainers above 0 are in no group that is made by hand
        members = [name for name in members if name == "trainer:0" or "rollout" in name]
    elif shape == "pairs":
        members = ["job:1", "job:2"]
    fault = "none" if seed % 2 == 0 else rng.choice(SHAPES[shape])
    if fault == "stale address":
        members = [name for name in members if name not in ("trainer:0", "job:1", "engine:0")]
    step = rng.randrange(3, 6) if shape in ("quorums", "restart") else rng.randrange(1, 6)
    return Job(seed, shape, sizes, fault, rng.choice(members), step, nodes)


class Run:
    """One run of a job in a folder that does not exist yet."""

    def __init__(self, job: Job, folder: Path, *, recorded: bool) -> None:
        self.job, self.folder, self.recorded = job, folder, recorded
        self.boxes = Path("/dev/shm") / f"commlens-worlds-{os.getpid()}-{job.seed}-{recorded:d}"
        (folder / "dumps").mkdir(parents=True)
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.ended_by_us = False
        self.told: list[tuple[str, dict[str, Any]]] = []  # before the processes are killed

    def run(self) -> None:
        """Start all processes and wait for a verdict, or for their end."""
        group, stale, *ports = [str(free_port()) for _ in range(2 + len(self.job.sizes))]
        common = {
            **{k: v for k, v in os.environ.items() if not k.startswith("COMMLENS")},
            "MASTER_ADDR": "127.0.0.1",
            "GROUP_PORT": group,
            "STALE_PORT": stale,
            "FAULT": self.job.fault,
            "CULPRIT": self.job.culprit,
            "STEP": str(self.job.step),
            "SIZES": json.dumps(self.job.sizes),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
            "PYTHONWARNINGS": "ignore",
            "COLUMNS": "200",
            "COMMLENS_STALL_TIMEOUT": str(STALL_TIMEOUT_S),
        }
        command = [sys.executable, *(["-m", "commlens", "run"] if self.recorded else [])]
        try:
            for (role, size), port in zip(self.job.sizes.items(), ports, strict=True):
                for rank in range(size):
                    node = f"node{self.job.node_of(role, rank)}"
                    own = {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(size),
                        "MASTER_PORT": port,
                        "COMMLENS_BOX_DIR": str(self.boxes / node),
                        "COMMLENS_DUMP_DIR": str(self.folder / "dumps" / node / role),
                    }
                    with (self.folder / f"{role}-{rank}.txt").open("wb") as output:
                        self.started[f"{role}:{rank}"] = subprocess.Popen(
                            [*command, str(PROGRAM), self.job.shape, role],
                            env=common | own,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
            self._wait()
            self.told = self.verdicts()
        finally:
            for each in self.started.values():
                with contextlib.suppress(OSError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()
            time.sleep(0.5)
            shutil.rmtree(self.boxes, ignore_errors=True)

    def _wait(self) -> None:
        began, told_at = time.monotonic(), 0.0
        while (now := time.monotonic()) - began < PATIENCE_S:
            if all(each.poll() is not None for each in self.started.values()):
                time.sleep(2)  # for the watcher's last words
                return
            if not told_at and self.recorded and self.verdicts():
                told_at = now
            if told_at and now - told_at > STALL_TIMEOUT_S + 3:  # a wrong one would have come
                break
            time.sleep(0.2)
        self.ended_by_us = True

    def verdicts(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the verdicts that were saved, with the role whose watcher saved each."""
        found = []
        for path in sorted(self.folder.glob("dumps/*/*/*/verdict.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append((path.parts[-3], json.loads(path.read_text())))
        return found

    def text(self) -> str:
        """Return all output."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("*.txt"))
        )

    def results(self) -> list[str]:
        """Return the checksums that the processes printed."""
        return sorted(re.findall(r"\w+ \d+ result \S+", self.text()))


def names_of(role: str, verdict: dict[str, Any]) -> set[str]:
    """Return the processes that a verdict's root causes blame, as ROLE:RANK."""
    worlds = msgspec.convert(verdict.get("worlds", {}), Worlds)
    roots = [finding for finding in verdict["findings"] if finding["root_cause"]] or [verdict]
    names = set()
    for finding in roots:
        if finding["kind"] in NO_FAULT:
            continue
        for number in finding["culprits"]:
            names.add(name_of(number, role, worlds))
    return names


def idle_of(role: str, verdict: dict[str, Any]) -> set[str]:
    """Return the processes of which a verdict says that they may be the missing member."""
    worlds = msgspec.convert(verdict.get("worlds", {}), Worlds)
    numbers = [each for one in verdict["findings"] for each in one["cause"].get("idle", [])]
    return {name_of(number, role, worlds) for number in numbers}


def name_of(number: int, role: str, worlds: Worlds) -> str:
    """Return ROLE:RANK of a process of the job whose ``role`` had the verdict."""
    if any(number == outsider.number for outsider in worlds.outsiders):
        return f"a process that is not known, {number}"
    if len(worlds.worlds) < 2:  # the script's name is that of its only world
        return f"{role}:{number}"
    world = next(world for world in worlds.worlds if number in world.numbers)
    return f"{world.name}:{number - world.first}"


def judge(job: Job, run: Run, bare: Run | None) -> tuple[str, str]:
    """Return the outcome and its reason."""
    text = run.text()
    faults = [(role, each) for role, each in run.told if each["kind"] not in NO_FAULT]
    summaries = "; ".join(each["summary"] for _, each in faults)
    errors = re.findall(r"^.*(?:commlens.* failed.*)$", text, re.MULTILINE)
    if job.fault == "none":
        if faults or "VERDICT" in text:
            return "false word", summaries
        if run.ended_by_us:
            return "harm", "it did not end"
        if bare is not None and run.results() != bare.results():
            return "harm", f"results {run.results()}, bare {bare.results()}"
        return ("harm", errors[0]) if errors else ("right", "")
    blamed = set().union(*(names_of(role, each) for role, each in faults))
    if wrong := blamed - {job.culprit}:
        return "wrong name", f"{sorted(wrong)}: {summaries}"
    if errors:
        return "harm", errors[0]
    if not faults:
        return "silence", f"{text.count('VERDICT')} verdicts printed"
    if not blamed:
        idle = set().union(*(idle_of(role, each) for role, each in faults))
        if idle == {job.culprit}:
            return "perhaps", summaries
        return ("undecided" if job.fault in UNDECIDABLE else "unnamed"), summaries
    return "right", ""


def try_job(job: Job, keep: Path) -> tuple[Job, str, str]:
    """Run a job, bare too if it is healthy. Returns its outcome and the reason."""
    folder = keep / f"seed-{job.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    run = Run(job, folder / "recorded", recorded=True)
    run.run()
    bare = None
    if job.fault == "none":
        for attempt in range(2):  # gloo itself sometimes fails to connect
            bare = Run(job, folder / f"bare-{attempt}", recorded=False)
            bare.run()
            if bare.results():
                break
    outcome, why = judge(job, run, bare)
    print(f"{outcome:10} {job}{'; ' * bool(why)}{why}", flush=True)
    if outcome == "right":
        shutil.rmtree(folder, ignore_errors=True)
    return job, outcome, why


def table(outcomes: list[tuple[Job, str, str]]) -> str:
    """Return the counts as Markdown: one row for each fault."""
    import torch

    import commlens

    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for job, outcome, _ in outcomes:
        counts["none: healthy" if job.fault == "none" else job.fault][outcome] += 1
    seeds = [job.seed for job, _, _ in outcomes]
    on = f" on {outcomes[0][0].nodes} nodes" if outcomes[0][0].nodes > 1 else ""
    heading = (
        f"{len(outcomes)} jobs{on} (seeds {min(seeds)} to {max(seeds)}) over gloo on"
        f" {datetime.now(timezone.utc).date().isoformat()}: commlens {commlens.__version__}, torch"
        f" {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores."
    )
    return f"{heading}\n\n{counts_table(counts, OUTCOMES)}"


def main() -> int:
    """Run the jobs, print the table, and return 1 if there was a miss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=120, help="the number of jobs")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--nodes", type=int, default=1, help="the number of emulated nodes")
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="of the jobs"
    )
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time")
    parser.add_argument(
        "--keep", type=Path, default=Path("worlds-misses"), help="the folder that keeps misses"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the table into {DOCUMENT.name}"
    )
    arguments = parser.parse_args()
    seeds = (
        range(arguments.first, arguments.first + arguments.jobs)
        if arguments.seed is None
        else [arguments.seed]
    )
    with ThreadPoolExecutor(arguments.at_once) as pool:
        jobs = [draw(seed, arguments.nodes, arguments.shapes) for seed in seeds]
        outcomes = list(pool.map(lambda job: try_job(job, arguments.keep.resolve()), jobs))
    words = table(outcomes)
    print(words)
    if arguments.write:
        name = "soak of worlds" if arguments.nodes == 1 else "soak of worlds on several nodes"
        write_section(DOCUMENT, name, words)
    return int(any(outcome not in ("right", "perhaps", "undecided") for _, outcome, _ in outcomes))


if __name__ == "__main__":
    sys.exit(main())
