"""Collect the test results and the cost of recording for each tested torch and Python.

python benchmarks/versions.py [--quick] [--json FILE]

It measures the environment in which it runs, and keeps the rows of the others from
benchmarks/results/performance.json. To add one:

    make compat TORCH=2.15.0      # runs all tests and keeps their report in the environment
    make bench VENV=.venv-torch-2.15.0 TORCH_VERSION=2.15.0 ARGS="--only versions"
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from _report import Goal, Report, arguments, command, finish, us

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "results" / "performance.json"
TESTS = Path(sys.prefix) / "tests.xml"
"""pytest's report (``--junitxml``) of the last test run in this environment; ``make test`` writes
it.
"""
ENGINES = ("Python engine", "native engine")
COST_S = 300.0


def kept() -> list[dict[str, Any]]:
    """Return the saved rows of other environments."""
    try:
        return list(json.loads(FIGURES.read_text(encoding="utf-8"))["versions"]["rows"])
    except (OSError, KeyError):
        return []


def built() -> tuple[Path, str]:
    """Return the cache and the compiler of the native engine that this environment's tests use,
    building it if necessary.
    """
    from commlens.errors import NativeEngineError
    from commlens.native import build

    cache = Path(
        os.environ.get("COMMLENS_TEST_NATIVE") or Path(sys.prefix) / "native-cache"
    ).resolve()
    try:
        return cache, str(build.build(cache)[0].about["compiler"])
    except NativeEngineError as error:
        return cache, f"none: {error}"


def tests(report: Path) -> dict[str, Any]:
    """Return the counts of all tests and of those that run once under each engine, and the names of
    those that failed.
    """
    counts: dict[str, dict[str, int]] = {
        name: {"passed": 0, "skipped": 0, "failed": 0} for name in ("all", *ENGINES)
    }
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        found = {child.tag for child in case}
        outcome = (
            "failed"
            if found & {"failure", "error"}
            else "skipped"
            if "skipped" in found
            else "passed"
        )
        parameters = re.split(r"[\[\]-]", name)
        counts["all"][outcome] += 1
        for engine, parameter in zip(ENGINES, ("python", "native"), strict=True):
            counts[engine][outcome] += (
                "integration" in case.get("classname", "") and parameter in parameters[1:]
            )
        if outcome == "failed":
            failed.append(f"{case.get('classname', '')}.{name}")
    day = time.strftime("%Y-%m-%d", time.gmtime(report.stat().st_mtime))
    return {"counts": counts, "failed": failed, "day": day}


def costs(cache: Path, quick: bool) -> dict[str, float]:
    """Return the microseconds that each engine adds to an all_reduce on the fake backend."""
    with tempfile.TemporaryDirectory(prefix="commlens-benchmark-") as folder:
        figures = Path(folder) / "figures.json"
        options = [
            *(["--quick"] if quick else ["--rounds", "300"]),
            "--backends",
            "fake:4",
            "--json",
            str(figures),
        ]
        subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "record_cost.py"), *options],
            stdout=subprocess.DEVNULL,
            check=True,
            env={**os.environ, "COMMLENS_NATIVE_DIR": str(cache)},
            timeout=COST_S,
        )
        rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    return {
        row["mode"]: row["added_us"]
        for row in rows
        if row["case"] == "all_reduce" and row["mode"] in ENGINES
    }


def here(quick: bool) -> dict[str, Any]:
    """Return the row of this environment."""
    import torch

    cache, compiler = built()
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "compiler": compiler,
        "tests": tests(TESTS) if TESTS.exists() else None,
        "added_us": costs(cache, quick),
    }


def environment(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the key by which rows are distinguished and sorted: torch without its build
    (``+cpu``), and Python's minor version.
    """
    return [int(part) for part in re.findall(r"\d+", row["torch"])[:3]], [
        int(part) for part in row["python"].split(".")[:2]
    ]


def counted(row: dict[str, Any], what: str) -> str:
    """Return the outcome of tests in words."""
    if row["tests"] is None:
        return "not run"
    counts = row["tests"]["counts"][what]
    return ", ".join(
        f"{number:,} {outcome}"
        for outcome, number in counts.items()
        if number or outcome == "passed"
    )


def main() -> None:
    """Measure and print."""
    given = arguments(__doc__).parse_args()
    mine = here(given.quick)
    rows = sorted(
        [mine, *(row for row in kept() if environment(row) != environment(mine))], key=environment
    )
    report = Report(
        "Tested versions",
        "Each row is one environment. Its tests are those of the last run with a saved report:"
        " `make test` and `make compat` save all tests; a smaller number means only the tests"
        " closest to torch. The next columns count the tests that run once under each engine."
        " Skipped tests cannot run with this torch or on this machine, and give the reason. The"
        " last column is what recording adds to an `all_reduce` on the fake backend"
        " (`record_cost.py`); compare it within a row only.",
        command(),
        rows=rows,
    )
    report.table(
        "",
        [
            "torch",
            "Python",
            "compiler",
            "tests",
            *(f"under the {name}" for name in ENGINES),
            "added by the Python, native engine",
        ],
        [
            [
                row["torch"],
                row["python"],
                row["compiler"],
                counted(row, "all"),
                *(counted(row, name) for name in ENGINES),
                ", ".join(
                    f"{us(row['added_us'][name])} us" if name in row["added_us"] else "-"
                    for name in ENGINES
                ),
            ]
            for row in rows
        ],
    )
    failed = [
        f"torch {row['torch']}, Python {row['python']}: {name}"
        for row in rows
        if row["tests"]
        for name in row["tests"]["failed"]
    ]
    report.left_out += [f"Failed with {name}." for name in failed]
    tried = [row for row in rows if row["tests"]]
    report.goals.append(
        Goal(
            "Both engines pass their tests on every tested torch and Python",
            f"{len(tried)} environments, {len(failed)} failures",
            bool(tried)
            and not failed
            and all(row["tests"]["counts"]["native engine"]["passed"] for row in tried),
        )
    )
    finish(report, given)


if __name__ == "__main__":
    main()
