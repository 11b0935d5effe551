"""Measure what commlens's plugin for NCCL adds to each event that NCCL tells, in nanoseconds.

python benchmarks/nccl_profiler_cost.py [--quick] [--json FILE]

No GPU is needed: a driver in C plays NCCL's calls, version 6 of the interface, at 10,000 events a
second and flat out. What the clock itself takes is subtracted.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _report import Goal, Report, arguments, command, finish

REPOSITORY = Path(__file__).resolve().parents[1]
SUPPORT = REPOSITORY / "tests" / "unit" / "support"
LEVELS = ("calls", "kernels", "transfers")
RATE = 10_000  # events a second
ROUNDS = 5


def measure(level: str, every_ns: int, events: int, folder: str, builds: list[str]) -> None:
    """In a process of its own: print p50, p99, and what was lost."""
    sys.path[:0] = [str(SUPPORT), str(REPOSITORY / "src")]
    os.environ["COMMLENS_NCCL_FOLDER"], os.environ["COMMLENS_NCCL_EVENTS"] = folder, level
    from nccl_player import Player

    from commlens.blackbox.nccl_events import read_events

    play = Player(Path(builds[0]), Path(builds[1]))
    comm = play.communicator(1, "dp", 8, 0)
    took = np.zeros(events, np.uint32)
    calls = play.measure(comm.context, took.ctypes.data_as(ctypes.c_void_p), events, every_ns)
    record = read_events(Path(folder, f"nccl.{os.getpid()}").read_bytes())
    p50, p99 = np.percentile(took[: int(calls)], [50, 99])
    print(p50, p99, record.lost + record.torn)


def one_round(
    level: str, every_ns: int, events: int, folder: str, builds: list[str]
) -> list[float]:
    """Return p50, p99 and what was lost of one process."""
    given = ["--measure", level, str(every_ns), str(events), folder, *builds]
    ended = subprocess.run(
        [sys.executable, __file__, *given], capture_output=True, text=True, check=True, timeout=120
    )
    return [float(each) for each in ended.stdout.split()]


def main() -> int:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--measure"]:
        level, every_ns, events, folder, *builds = sys.argv[2:]
        measure(level, int(every_ns), int(events), folder, builds)
        return 0
    given = arguments(__doc__).parse_args()
    sys.path.insert(0, str(SUPPORT))
    import nccl_player

    report = Report(
        "NCCL's plugin",
        "A driver in C plays NCCL's calls of all-reduces with two channels to the plugin, from one"
        f" thread. Each figure is the median of {ROUNDS} processes.",
        command(),
    )
    rows, worst_ns, lost = [], 0.0, 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        at = Path(folder)
        builds = [nccl_player.build_plugin(at), nccl_player.build(at, nccl_player.PLAYER)]
        for level in LEVELS:
            row: dict[str, Any] = {"level": level}
            for name, every_ns, events in (
                ("at the rate", 10**9 // RATE, 20_000),
                ("flat out", 0, 1_000_000),
            ):
                found = [
                    one_round(
                        level,
                        every_ns,
                        events // (10 if given.quick else 1),
                        folder,
                        [*map(str, builds)],
                    )
                    for _ in range(1 if given.quick else ROUNDS)
                ]
                p50, p99, gone = (float(each) for each in np.median(found, axis=0))
                row[name] = {"p50_ns": p50, "p99_ns": p99, "lost": gone}
                worst_ns, lost = max(worst_ns, p50), max(lost, *(each[2] for each in found))
            report.rows.append(row)
            cells = (
                f"{row[name][part]:.0f}"
                for name in ("at the rate", "flat out")
                for part in ("p50_ns", "p99_ns")
            )
            rows.append([level, *cells])
    report.table(
        "",
        ["level", f"p50 at {RATE:,}/s, ns", "p99", "p50 flat out, ns", "p99"],
        rows,
    )
    report.goals = [
        Goal("an event costs at most 200 ns (p50)", f"{worst_ns:.0f} ns", worst_ns <= 200),
        Goal(f"none is lost below {RATE:,} events a second", f"{lost:.0f}", lost == 0),
    ]
    finish(report, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
