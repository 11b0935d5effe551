r"""Measure the CPU time, wall time and peak memory of a diagnosis, of torchfrtrace, and of a bare
``pickle.load`` of the same files.

    python benchmarks/diagnose_cost.py --sizes 8 64 256 1024 4096 10240 \
        --json cost.json --markdown cost.md

Each measurement is a command of its own, with its worker processes, on generated dumps of 2,000
entries per rank. CPU is user and system time; memory is the proportional set size of all its
processes, sampled ten times a second. The bare load is one process that calls ``pickle.load`` on
one file after the other and keeps nothing, with Python's garbage collector off, which makes it
twice as fast. The jobs have no pipeline, because torchfrtrace gives up early on messages and would
seem cheap. The files have been read once before, so that no tool waits for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import _diagnosing as judge
from _report import Goal
from dumpgen import Conditions, Job
from dumpgen.faults import by_name
from dumpgen.mesh import FLAT_MESHES

BARE = (
    "import gc, pickle, sys, os\ngc.disable()\nfor e in os.scandir(sys.argv[1]):\n    with"
    " open(e.path, 'rb') as f: pickle.load(f)\n"
)
CASES = ("stuck-before-tp", "healthy-done")


def measured(size: int, fault: str, *, rival: bool, folder: Path, runs: int) -> dict[str, Any]:
    """Return every tool's cost for one size and fault, from the cheapest of its runs."""
    job = Job(FLAT_MESHES[size], by_name(fault), Conditions())
    job.write(folder, processes=os.cpu_count() or 1)
    megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    row: dict[str, Any] = {"ranks": size, "fault": fault, "disk_mb": round(megabytes, 1)}
    commands = {
        "bare": [sys.executable, "-S", "-c", BARE, str(folder)],
        "commlens": [sys.executable, "-m", "commlens", "diagnose", str(folder), "--json"],
    }
    if rival:
        commands["torchfrtrace"] = [*judge.TORCHFRTRACE, str(folder), "-p", "rank_"]
    for tool, command in commands.items():
        costs = [judge.measure(command) for _ in range(1 if tool == "torchfrtrace" else runs)]
        best = min(costs, key=lambda cost: cost.cpu_s)
        row[tool] = {**best.as_row(), "runs": len(costs)}
        if best.status not in (0, 1):
            row[tool]["failed"] = best.text.strip().splitlines()[-1:]
    row["of_bare"] = round(row["commlens"]["cpu_s"] / row["bare"]["cpu_s"], 2)
    if rival:
        row["times_less_cpu"] = round(row["torchfrtrace"]["cpu_s"] / row["commlens"]["cpu_s"], 1)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [
        (
            "| ranks | dumps | on disk | commlens CPU | time | peak memory | bare `pickle.load` CPU"
            " | commlens / bare | torchfrtrace CPU | time | peak memory | less CPU |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, bare, theirs = row["commlens"], row["bare"], row.get("torchfrtrace")
        cells = [
            f"{row['ranks']:,}",
            row["fault"],
            f"{row['disk_mb']:,.0f} MB",
            f"{ours['cpu_s']:.2f} s",
            f"{ours['wall_s']:.2f} s",
        ]
        cells += [f"{ours['peak_mb']:,.0f} MB", f"{bare['cpu_s']:.2f} s", f"{row['of_bare']:.2f}"]
        if theirs:
            cells += [
                f"{theirs['cpu_s']:.1f} s",
                f"{theirs['wall_s']:.1f} s",
                f"{theirs['peak_mb']:,.0f} MB",
                f"{row['times_less_cpu']:.0f}x",
            ]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goal of the design, with what was measured."""
    at = [row for row in rows if row["ranks"] == 256 and "torchfrtrace" in row]
    if not at:
        return []
    least = min(row["times_less_cpu"] for row in at)
    return [
        Goal(
            "A diagnosis at 256 ranks takes at most 1/20 of torchfrtrace's CPU time",
            f"1/{least:.0f}",
            least >= 20,
        )
    ]


def main() -> int:
    """Measure, print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[8, 64, 256], choices=sorted(FLAT_MESHES)
    )
    parser.add_argument("--faults", nargs="*", default=list(CASES))
    parser.add_argument(
        "--rival-up-to", type=int, default=1024, help="run torchfrtrace only up to this world size"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="runs of commlens and of the bare load; the cheapest counts",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the dumps here during the run (default: the system's temporary folder)",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    rows = []
    for size in arguments.sizes:
        for fault in arguments.faults:
            with tempfile.TemporaryDirectory(
                prefix="commlens-cost-", dir=arguments.folder
            ) as folder:
                runs = arguments.runs if size <= 1024 else 1
                rows.append(
                    measured(
                        size,
                        fault,
                        rival=size <= arguments.rival_up_to,
                        folder=Path(folder),
                        runs=runs,
                    )
                )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    judge.tell(table(rows), rows, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
