"""Run random distributed jobs, healthy and with one fault, and count what commlens says about them:
``make soak MINUTES=60``.

Every job is a real one of 2 to 6 processes, over gloo or over a backend that behaves as NCCL does
(tests/nccl_like). A miss keeps its folder, with the program, the output and the dump; its seed
replays it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime, timezone
from pathlib import Path

from _report import counts_table
from _soak_job import FINE, NCCL_LIKE_SHARE, OUTCOMES, Outcome, nccl_like, try_seed
from _soak_program import GLOO, NCCL_LIKE

DOCUMENT = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- soak over {} -->", "<!-- end of soak over {} -->"


def main() -> int:
    """Run the soak, print the table, and return 1 if there was a miss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=60, help="start no more jobs after this time"
    )
    parser.add_argument("--jobs", type=int, default=10**6, help="the number of jobs")
    parser.add_argument(
        "--first",
        type=int,
        default=int(time.time()),
        help="the first seed; the next jobs have the next ones",
    )
    parser.add_argument(
        "--seed", type=int, help="run this seed alone, and print all that it printed"
    )
    parser.add_argument(
        "--backend",
        choices=[GLOO, NCCL_LIKE, "both"],
        default="both",
        help=(
            f"of the jobs; both: one job in {1 / NCCL_LIKE_SHARE:.0f} is over {NCCL_LIKE}, as the"
            " seed draws"
        ),
    )
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time")
    parser.add_argument(
        "--keep", type=Path, default=Path("soak-misses"), help="the folder for misses"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables into {DOCUMENT.name}"
    )
    arguments = parser.parse_args()
    if arguments.backend != GLOO:
        try:
            nccl_like()
        except RuntimeError as error:
            parser.error(
                f"--backend {arguments.backend}: {error}. --backend {GLOO} runs without it."
            )
    if arguments.seed is not None:
        return _replay(arguments.seed, arguments.keep, arguments.backend)
    load = _Load()
    outcomes = _run(arguments)
    for backend in (GLOO, NCCL_LIKE):
        if of_backend := [outcome for outcome in outcomes if outcome.program.backend == backend]:
            table = _table(of_backend, load.mean(), backend)
            print(table)
            if arguments.write:
                begin, end = BEGIN.format(backend), END.format(backend)
                text = DOCUMENT.read_text(encoding="utf-8")
                before, after = text.partition(begin)[0], text.partition(end)[2]
                DOCUMENT.write_text(f"{before}{begin}\n{table}{end}{after}", encoding="utf-8")
    return int(any(outcome.outcome not in FINE for outcome in outcomes))


def _replay(seed: int, keep: Path, backend: str) -> int:
    folder = keep / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    outcome = try_seed(seed, folder, backend)
    print(outcome.text)
    print(_line(outcome))
    print(f"The program and its dump are in {folder}.")
    return int(outcome.outcome not in FINE)


def _run(arguments: argparse.Namespace) -> list[Outcome]:
    """Run jobs until the time or their number is reached."""
    end = time.monotonic() + 60 * arguments.minutes
    outcomes: list[Outcome] = []
    seeds = iter(range(arguments.first, arguments.first + arguments.jobs))
    running: set[Future[Outcome]] = set()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        while True:
            while (
                len(running) < arguments.at_once
                and time.monotonic() < end
                and (seed := next(seeds, None)) is not None
            ):
                running.add(pool.submit(_one, seed, arguments.keep, arguments.backend))
            if not running:
                return outcomes
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                outcomes.append(each.result())
                print(_line(outcomes[-1]), flush=True)


def _one(seed: int, keep: Path, backend: str) -> Outcome:
    """Run a seed; keep the folder of a miss."""
    folder = keep / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    outcome = try_seed(seed, folder, backend)
    if outcome.outcome in FINE:
        shutil.rmtree(folder)
    else:
        (folder / "miss.txt").write_text(_line(outcome) + "\n", encoding="utf-8")
    return outcome


def _line(outcome: Outcome) -> str:
    program = outcome.program
    truth = program.truth
    what = truth.fault if truth.fault == "none" else f"{truth.fault} on rank {truth.culprit}"
    pieces = ",".join(program.pieces)
    judged = outcome.outcome if outcome.outcome in FINE else outcome.outcome.upper()
    return (
        f"{judged:10} seed {program.seed}: {what}; {program.size} ranks over {program.backend};"
        f" {outcome.setting}; {pieces}; {outcome.seconds:.0f}"
        f" s{'; ' * bool(outcome.why)}{outcome.why}"
    )


class _Load(threading.Thread):
    """Samples the machine's load."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples: list[float] = []
        self.start()

    def run(self) -> None:
        while True:
            self._samples.append(os.getloadavg()[0])
            time.sleep(10)

    def mean(self) -> float:
        return sum(self._samples) / max(1, len(self._samples))


def _table(outcomes: list[Outcome], load: float, backend: str) -> str:
    """Return the counts as Markdown: one row for each class of fault, one column for each outcome."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        counts[fault_class(outcome.program.truth.fault)][outcome.outcome] += 1
    columns = [
        name
        for name in OUTCOMES
        if name in (*FINE, "silence", "wrong rank", "false word", "harm")
        or any(c[name] for c in counts.values())
    ]
    import torch

    import commlens

    when = datetime.now(timezone.utc).date().isoformat()
    heading = (
        f"{len(outcomes)} jobs over {backend} on {when}: commlens {commlens.__version__}, torch"
        f" {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores with"
        f" a mean load of {load:.1f}."
    )
    return f"{heading}\n\n{counts_table(counts, columns)}\n\n"


def fault_class(fault: str) -> str:
    """Return the class of a fault: without the piece that has it."""
    name = re.sub(r" in \w+$", "", fault)
    if name in ("skip", "extra", "reorder"):
        return f"a collective: {name}"
    if name in ("shape", "dtype", "reduce-op", "root", "op", "p2p", "tag"):
        return f"another {name}" if name not in ("p2p", "tag") else "another tag or peer"
    return "none: healthy" if name == "none" else name


if __name__ == "__main__":
    sys.exit(main())
