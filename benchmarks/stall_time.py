"""Measure how long after a fault the verdict comes, in the scenarios that hang, with the default
settings.

    python benchmarks/stall_time.py [--only NAME ...] [--ranks 4] [--json FILE]

A job ends with its verdict, so a fault that is certain takes seconds and any other the whole stall
timeout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from harness import Harness, JobResult, harness
from more_scenarios import SCENARIOS
from pauses import is_notice

from commlens.commands.demo import differences
from commlens.config import Settings
from commlens.model.verdict import Verdict
from commlens.scenarios import Ending, Scenario

TIMEOUT_S = 240.0


def measure(jobs: Harness, scenario: Scenario, ranks: int, folder: Path) -> dict[str, Any]:
    """Run one scenario until its verdict, and return when what was said."""
    result = jobs.run_job(
        scenario,
        ranks,
        folder,
        settings=Settings(),
        timeout_s=TIMEOUT_S,
        arguments=[str(Path(__file__).parent / "_patient_scenario.py"), scenario.name],
    )
    began = _fault_at(result)
    verdicts = [
        (at, what) for at, what in result.said if isinstance(what, Verdict) and what.is_fault
    ]
    notices = [at for at, what in result.said if isinstance(what, str) and is_notice(what)]
    return {
        "scenario": scenario.name,
        "verdict_s": round(verdicts[0][0] - began, 1) if verdicts else None,
        "notice_s": round(notices[0] - began, 1) if notices else None,
        "certain": bool(verdicts and verdicts[0][1].certain),
        "wrong": [
            each for _, what in verdicts for each in differences(what, scenario.truth(ranks))
        ],
    }


def _fault_at(result: JobResult) -> float:
    """Return when the oldest wait of the dump began, Unix time."""
    ops = [op for log in result.logs() for op in (*log.collectives, *log.setups) if op.in_flight]
    return min((op.announced_ns / 1e9 for op in ops), default=0.0)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="scenarios that contain one of these"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch, harness() as jobs:
        for scenario in SCENARIOS:
            if (
                scenario.fault is None
                or scenario.ending is not Ending.HANGS
                or not any(each in scenario.name for each in arguments.only)
                or scenario.impossible()
            ):
                continue
            row = measure(jobs, scenario, arguments.ranks, Path(scratch) / scenario.name)
            rows.append(row)
            print(row, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))
    for title, some in (
        ("certain", [row for row in rows if row["certain"]]),
        ("the rest", [row for row in rows if not row["certain"]]),
    ):
        times = [row["verdict_s"] for row in some if row["verdict_s"] is not None]
        if times:
            print(
                f"{title}: {len(times)} scenarios, verdict after"
                f" {percentile(times, 0.5):.1f} s (p50), {percentile(times, 0.9):.1f} s (p90)"
            )


if __name__ == "__main__":
    main()
