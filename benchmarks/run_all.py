"""Run all benchmarks, one after the other, and write the results: ``make bench``.

    python benchmarks/run_all.py [--quick] [--only record_cost verify_cost ...] [--write]

A benchmark that fails or takes too long is reported, and the others still run. ``--write`` rewrites
the page docs/performance.md, its data, benchmarks/results/performance.json, and the README's table
of them; all keep the earlier results of benchmarks that did not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _readme
from _report import WORDS, machine

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
FIGURES = HERE / "results" / "performance.json"

ABOUT = (
    "What commlens costs and how often it is right. `make bench` (`python benchmarks/run_all.py"
    " --write`) measures this and writes the page. Each section gives its command and machine."
    " Ratios and differences compare neighbouring runs; absolute times hold for that machine."
)


GPU_GOAL = "All claims about recording, verdicts and NCCL hold on a GPU"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark script.

    Args:
        name: of the file, without its ending.
        title: for a script that has none in its report.
        options: of the command; ``quick`` for a quick run.
        limit_s: when to end it.
        reports: whether it writes a report (``_report.py``); otherwise its ``--markdown`` tables,
            or its output, are used.
    """

    name: str
    title: str = ""
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    limit_s: int = 600
    reports: bool = True
    markdown: bool = False


BENCHMARKS = (
    Benchmark("record_cost"),
    Benchmark("verify_cost"),
    Benchmark("step_time", quick=("--quick", "--only", "DDP", "TP")),
    Benchmark("memory_cost", limit_s=300),
    Benchmark(
        "comm_debug_cost",
        "Tracing compared with CommDebugMode",
        ("--rounds", "20"),
        quick=("--rounds", "5"),
        reports=False,
    ),
    Benchmark("estimate_check", limit_s=1200),
    Benchmark(
        "watch_cost",
        "What the watcher costs",
        quick=("--seconds", "5", "--rounds", "1"),
        reports=False,
    ),
    Benchmark(
        "diagnose_cost",
        "What a diagnosis costs",
        (
            "--sizes",
            "8",
            "64",
            "256",
            "1024",
            "--faults",
            "stuck-before-tp",
            "--rival-up-to",
            "256",
            "--runs",
            "2",
        ),
        ("--sizes", "8", "--faults", "stuck-before-tp", "--runs", "1"),
        reports=False,
        markdown=True,
    ),
    Benchmark(
        "diagnose_score",
        "How often a diagnosis is right",
        ("--sizes", "16", "--conditions", "plain"),
        ("--sizes", "16", "--conditions", "plain", "--only", "stuck-before-tp"),
        900,
        reports=False,
        markdown=True,
    ),
    Benchmark("check_score", limit_s=1800),
    Benchmark("check_soak", options=("--programs", "200"), limit_s=3600),
    Benchmark("gpu_check"),
    Benchmark("versions"),
)


def run(benchmark: Benchmark, quick: bool) -> dict[str, Any]:
    """Run a benchmark and return its report; if it fails, a report of the failure."""
    with tempfile.TemporaryDirectory(prefix="commlens-benchmark-") as folder:
        figures, tables = Path(folder) / "figures.json", Path(folder) / "tables.md"
        options = benchmark.quick if quick else benchmark.options
        command = [sys.executable, "-W", "ignore", str(HERE / f"{benchmark.name}.py"), *options]
        if benchmark.reports:
            command += ["--json", str(figures)]
        elif benchmark.markdown:
            command += ["--markdown", str(tables), "--json", str(figures)]
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        began = time.monotonic()
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                printed, _ = process.communicate(timeout=benchmark.limit_s)
                failed = (
                    "" if process.returncode == 0 else f"it exited with status {process.returncode}"
                )
            except subprocess.TimeoutExpired:
                failed = f"it did not finish within {benchmark.limit_s} s"
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
                printed, _ = process.communicate()
        report: dict[str, Any] = {
            "title": benchmark.title,
            "about": "",
            "markdown": "",
            "rows": [],
            "goals": [],
            "left_out": [],
        }
        report.update(
            name=benchmark.name,
            command=" ".join(["python", f"benchmarks/{benchmark.name}.py", *options]),
            machine=machine(),
        )
        if failed:
            report["failed"] = f"{benchmark.name} could not be measured: {failed}."
        elif benchmark.reports:
            report.update(json.loads(figures.read_text(encoding="utf-8")))
        elif benchmark.markdown:
            rows = json.loads(figures.read_text(encoding="utf-8"))
            report["markdown"] = "\n" + tables.read_text(encoding="utf-8")
            report["goals"] = [
                dataclasses.asdict(goal)
                for goal in importlib.import_module(benchmark.name).goals(rows)
            ]
            report["rows"] = [
                {name: value for name, value in row.items() if not name.endswith("_says")}
                for row in rows
            ]
        else:
            report["markdown"] = f"\n```\n{printed.strip()}\n```\n"
        report["seconds"] = round(time.monotonic() - began)
    return report


def is_less(report: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether a report must not replace an earlier one: it failed, or found nothing to
    measure, as gpu_check does without a GPU.
    """
    return bool(report.get("failed")) or (not report.get("rows") and bool(before.get("rows")))


def page(reports: list[dict[str, Any]]) -> str:
    """Return the page: the goals, then each benchmark."""
    figures = {report["name"]: report for report in reports}
    lines = ["# Performance", "", *_readme.answers(figures), ABOUT, ""]
    goals = [
        goal for report in reports if report["name"] != "gpu_check" for goal in report["goals"]
    ]
    if on_gpu := figures.get("gpu_check", {}).get("goals"):
        right = sum(goal["met"] is True for goal in on_gpu)
        words = f"{right} of {len(on_gpu)}: [the table](#on-a-gpu)"
        goals.append({"goal": GPU_GOAL, "measured": words, "met": right == len(on_gpu)})
    if goals:
        lines += ["## Goals", "", "| goal | measured | |", "|---|---|---|"]
        lines += [
            f"| {goal['goal']} | {goal['measured']} | {WORDS[goal['met']]} |" for goal in goals
        ] + [""]
    for report in reports:
        lines += [f"## {report['title'] or report['name']}", ""]
        if report.get("failed"):
            lines += [report["failed"], ""]
            continue
        if report["about"]:
            lines += [report["about"], ""]
        lines += [
            f"`{report['command']}`; {report['machine']}",
            report["markdown"],
            *(f"{sentence}\n" for sentence in report["left_out"]),
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run for some minutes, only to see whether they work: no figures to quote",
    )
    parser.add_argument("--only", nargs="+", choices=[benchmark.name for benchmark in BENCHMARKS])
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/performance.md and benchmarks/results/performance.json",
    )
    given = parser.parse_args()
    before: dict[str, Any] = (
        json.loads(FIGURES.read_text(encoding="utf-8")) if given.write and FIGURES.exists() else {}
    )
    found: dict[str, dict[str, Any]] = {}
    print(machine(), flush=True)
    for benchmark in BENCHMARKS:
        if given.only and benchmark.name not in given.only:
            continue
        print(f"\n{benchmark.name} ...", flush=True)
        report = found[benchmark.name] = run(benchmark, given.quick)
        print(report.get("failed") or report["markdown"], flush=True)
        for goal in report["goals"]:
            print(
                f"{WORDS[goal['met']].strip('*')}: {goal['goal']}: {goal['measured']}", flush=True
            )
        print(f"({report['seconds']} s)", flush=True)
    if given.write:
        kept = {
            **before,
            **{
                name: report
                for name, report in found.items()
                if not (name in before and is_less(report, before[name]))
            },
        }
        FIGURES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        _readme.write(kept)
        PAGE.write_text(
            page([kept[benchmark.name] for benchmark in BENCHMARKS if benchmark.name in kept]),
            encoding="utf-8",
        )
    failed = [report["failed"] for report in found.values() if report.get("failed")]
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
