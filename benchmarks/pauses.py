"""Run healthy jobs whose ranks pause, with the default settings and ``abort_on: stall``, and count
what the watcher says that it should not.

    unshare --net python benchmarks/pauses.py [--jobs 13] [--seed 1] [--only KIND] [--load N]

Without a network namespace of its own, the pauses in which the network is down are left out.
``--load`` keeps that many processes busy beside the jobs.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from harness import Harness, harness
from pausing_job import BURN, KINDS, ON_RANK_0

from commlens.config import Settings
from commlens.model.verdict import Verdict
from commlens.scenarios import find

PROGRAM = Path(__file__).parents[1] / "tests" / "integration" / "pausing_job.py"
RANKS = 4
TIMEOUT_S = 240.0
PAUSES_S = ((2.0, 40.0), (2.0, 15.0))  # each job pauses twice, for such a time
NETWORK_DOWN_S = 8.0  # at most


def own_network() -> bool:
    """Return whether this process has a network namespace of its own, and start its loopback
    interface, which is down in a new one.
    """
    shown = subprocess.run(["ip", "link", "show", "lo"], capture_output=True, check=False).stdout
    if not shown or b"UP" in shown.partition(b">")[0]:
        return False
    return subprocess.run(["ip", "link", "set", "lo", "up"], check=False).returncode == 0


def is_notice(line: str) -> bool:
    """Return whether a line mentions a wait that is longer than usual."""
    return line.endswith(("wait.", "waits.")) or " been waiting in " in line


def pauses_of(kind: str, seed: int) -> list[str]:
    """Return the pauses of a job, as its program takes them."""
    rng = random.Random(seed)
    found = []
    for shortest, longest in PAUSES_S:
        rank = 0 if kind in ON_RANK_0 else rng.randrange(RANKS)
        seconds = rng.uniform(shortest, NETWORK_DOWN_S if kind == "network" else longest)
        found.append(f"{kind}:{rank}:{seconds:.1f}")
    return found


def run(jobs: Harness, kind: str, seed: int, folder: Path, counts: Counter[str]) -> None:
    """Run one job, count what was said of it, and print that."""
    pauses = pauses_of(kind, seed)
    result = jobs.run_job(
        find("healthy-plain"),
        RANKS,
        folder,
        settings=Settings(),
        timeout_s=TIMEOUT_S,
        arguments=[str(PROGRAM), *pauses],
    )
    verdicts = [what for _, what in result.said if isinstance(what, Verdict)]
    faults = [verdict for verdict in verdicts if verdict.is_fault]
    early = [line for line in result.lines if is_notice(line)]
    ended = all(status == 0 for status in result.exits.values())
    counts.update(
        jobs=1,
        false_verdicts=int(bool(faults)),
        not_ended=int(not ended),
        with_notice=int(bool(early)),
    )
    print(f"seed {seed}, {result.seconds:.0f} s: {' '.join(pauses)}", flush=True)
    for what in [*faults, *result.lines] if faults or early or not ended else []:
        print(f"    {what}", flush=True)
    if not ended:
        print(result, flush=True)


def main() -> None:
    """Run the jobs, one after the other, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--only", default="", help="kinds that contain this")
    parser.add_argument("--load", type=int, default=0, help="processes that keep a core busy")
    arguments = parser.parse_args()
    has_network = own_network()
    kinds = [
        kind for kind in KINDS if arguments.only in kind and (has_network or kind != "network")
    ]
    busy = [
        subprocess.Popen([sys.executable, "-c", BURN.format(1e9)]) for _ in range(arguments.load)
    ]
    counts: Counter[str] = Counter()
    try:
        with tempfile.TemporaryDirectory() as scratch, harness() as jobs:
            for number in range(arguments.jobs):
                kind, seed = kinds[number % len(kinds)], arguments.seed + number
                run(jobs, kind, seed, Path(scratch) / str(number), counts)
                load = os.getloadavg()[0]
                print(f"{time.strftime('%H:%M')} load {load:.1f}: {dict(counts)}", flush=True)
    finally:
        for process in busy:
            process.kill()


if __name__ == "__main__":
    main()
