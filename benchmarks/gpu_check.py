"""Check on one GPU that recording tells the truth about NCCL, disturbs nothing, and what it costs.

    # here: put wheels into a folder, for a machine without a network
    python benchmarks/gpu_check.py --prepare build/gpu
    # there: run the checks, in nine minutes at most
    python benchmarks/gpu_check.py --from build/gpu --json FILE
    # here: write the results into docs/performance.md
    python benchmarks/gpu_check.py --write FILE
    # anywhere: a dry run, which judges nothing
    python benchmarks/gpu_check.py --device cpu --backend gloo --quick

Each check runs in processes of its own with a limit, so none that fails or hangs stops the others.
Lanes of checks run side by side, and what measures time runs alone afterwards.
Results are written as they come: one line of JSON each to FILE with the ending .jsonl, a summary to
.md, and all to FILE. Without a GPU, nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import _gpu_checks
import _gpu_jobs
import _gpu_scenarios
import _gpu_values
from _gpu_checks import (
    ALONE,
    FACTS,
    HEALTHY_PAIR,
    Bench,
    Check,
    NoResultError,
    SkippedError,
)
from _gpu_machine import REPOSITORY, Processes, install, prepare
from _report import Goal, Report, arguments, command

CHECKS = [*_gpu_checks.CHECKS, *_gpu_jobs.CHECKS, *_gpu_scenarios.CHECKS, *_gpu_values.CHECKS]
LIMIT_S = 540.0
RESERVE_S = 6.0  # for the end: the last lines are written, and processes ended

MACHINE = """
import json, os, platform, subprocess, sys
import torch, torch.distributed as dist
on_gpu = torch.cuda.is_available()
said = ""
ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
try:
    said = subprocess.run(ask, capture_output=True, text=True, timeout=15).stdout
except (OSError, subprocess.TimeoutExpired):
    pass
print(json.dumps({
    "gpu": torch.cuda.get_device_name(0) if on_gpu else "",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() and on_gpu else "",
    "has_nccl": dist.is_nccl_available(), "driver": said.strip(), "cuda": torch.version.cuda or "", "torch": torch.__version__,
    "python": platform.python_version(), "cores": os.cpu_count(),
}))
"""


STATUSES = {True: "yes", False: "no", None: "seen"}
"""What a judge says -> the status."""

CELL = 700  # letters


def plain(words: str) -> str:
    """Return the words for a cell of a table: without the marks of Python's dicts and lists."""
    words = words.replace("\\", "").replace("culprits []", "no culprit").replace("[]", "none")
    words = re.sub(r"culprits \[([\d, ]+)\]", r"culprit \1", words)
    words = re.sub(r"\[('[^\]]*')\]", r"\1", words)
    words = re.sub(r"[{}]|(?<!\w)'|'(?!\w)", "", words)
    return " ".join(words.replace("|", "/").split())


def short(words: str) -> str:
    """Return the words up to the last part that fits into a cell."""
    if len(words) <= CELL:
        return words
    return f"{words[:CELL].rpartition('; ')[0] or words[:CELL].rpartition(' ')[0]}; ..."


@dataclass
class Result:
    """The result of one check."""

    check: str
    claim: str
    # "yes", "no", "seen" (nothing to judge), "dry run", "skipped", "hung", "failed", "no time"
    status: str
    words: str
    seconds: float = 0.0
    finds: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """A run of all checks, whose results are written as they come."""

    bench: Bench
    machine: dict[str, Any]
    json_path: Path | None
    results: list[Result] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, check: Check, left_s: float, bench: Bench) -> Result:
        """Run one check on the bench of its lane. Never raises."""
        began = time.monotonic()
        if left_s < 10:
            result = Result(check.name, check.claim, "no time", "there was no time left")
        else:
            bench.limit_s = min(check.limit_s, left_s)
            result = self._measured(check, bench)
        result.seconds = round(time.monotonic() - began, 1)
        with contextlib.suppress(Exception):
            bench.processes.end_all()
        with self._lock:
            self.results.append(result)
            self.write()
        return result

    def _measured(self, check: Check, bench: Bench) -> Result:
        finds: dict[str, Any] = {}
        try:
            finds = check.measure(bench)
            right, words = check.judge(finds)
            words = plain(words)
            status = "dry run" if bench.is_dry else {True: "yes", False: "no", None: "seen"}[right]
        except SkippedError as why:
            status, words = "skipped", str(why)
        except NoResultError as why:
            status, words = "hung" if why.hung else "failed", str(why)
        except Exception as error:  # of ours: the other checks go on
            status, words = "failed", f"{type(error).__name__}: {error}"
        return Result(check.name, check.claim, status, words, finds=finds)

    def report(self) -> Report:
        """Return the report of the results so far."""
        report = report_of(self.results, about(self.machine, is_dry=self.bench.is_dry))
        if self.bench.is_dry:
            report.goals = []
            report.left_out.append(
                "This was a dry run without a GPU: it shows only that the checks run."
            )
        return report

    def write(self) -> None:
        """Write what is known so far."""
        if self.json_path is None:
            return
        report = self.report()
        with self.json_path.with_suffix(".jsonl").open("a", encoding="utf-8") as lines:
            lines.write(
                json.dumps(asdict(self.results[-1]) if self.results else self.machine) + "\n"
            )
        self.json_path.with_suffix(".md").write_text(
            f"# {report.title}\n\n{report.about}\n{report.markdown}", encoding="utf-8"
        )
        self.json_path.write_text(
            json.dumps(as_json(report, self.machine), indent=1), encoding="utf-8"
        )


def report_of(results: list[Result], about: str) -> Report:
    """Return the report of these results."""
    report = Report("On a GPU", about, command())
    rows = [[one.check, one.claim, one.status, short(one.words)] for one in results]
    report.table("", ["check", "claim", "", "seen"], rows)
    report.rows = [asdict(one) for one in results]
    report.goals = [
        Goal(one.claim, short(one.words), one.status == "yes")
        for one in results
        if one.status in ("yes", "no", "hung", "failed")
    ]
    return report


def about(machine: dict[str, Any], *, is_dry: bool) -> str:
    """Return what was checked, and on which card and versions."""
    where = (
        "no GPU"
        if is_dry
        else (
            f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, NCCL"
            f" {machine['nccl']}"
        )
    )
    return (
        f"Each check runs in processes of its own on one GPU: {where}, torch {machine['torch']}."
        " *yes*: the claim holds; *no*: it does not; *seen*: there is nothing to judge. Times of a"
        " call are medians over blocks in which all ways take turns. *issued*: the host made the"
        " call, and the device has not completed it; *(native-recorder)*: torch's Flight Recorder"
        " told the state; *unknown*: nothing told it."
    )


def as_json(report: Report, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the report in the form that run_all.py keeps."""
    words = (
        f"{machine.get('cores')} cores, Python {machine.get('python')}, torch"
        f" {machine.get('torch')}"
    )
    return {"machine": words, **asdict(report)}


def run(given: argparse.Namespace) -> int:
    """Run the checks. Return the exit status: 0 also if a claim is false, since that is a result."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="commlens-gpu-", ignore_cleanup_errors=True) as scratch:
        target, installed = Path(scratch) / "packages", []
        path = [str(REPOSITORY / "src")]
        if given.wheels is not None:
            installed = install(given.wheels, target)
            path = [str(target)]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": os.pathsep.join([str(target / "bin"), os.environ.get("PATH", "")]),
            "COMMLENS_NATIVE_DIR": os.environ.get(
                "COMMLENS_NATIVE_DIR", str(Path(scratch) / "native")
            ),
            "COMMLENS_AUTO_BUILD": "0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        bench = Bench(
            Processes(environ, Path(scratch)),
            Path(scratch),
            given.device,
            given.backend,
            given.quick,
        )
        asked = bench.processes.run([sys.executable, "-W", "ignore", "-c", MACHINE], 120)
        machine = {
            "installed": installed,
            **(asked.result or {"torch": f"unknown: {asked.reason}"}),
        }
        if not bench.is_dry and not (machine.get("gpu") and machine.get("has_nccl")):
            why = "this torch has no NCCL" if machine.get("gpu") else "this torch sees no GPU"
            return nothing_measured(
                why if "unknown" not in machine["torch"] else machine["torch"],
                machine,
                given.json,
            )
        print(about(machine, is_dry=bench.is_dry), flush=True)
        if given.json is not None:
            given.json.with_suffix(".jsonl").unlink(missing_ok=True)
        running = Run(bench, machine, given.json)
        running.write()
        chosen = [
            check
            for check in CHECKS
            if not given.only or any(check.name.startswith(name) for name in given.only)
        ]
        if not any(check.name == HEALTHY_PAIR for check in chosen):
            bench.two_ranks.tell("no healthy job of two ranks was run")
        run_lanes(running, chosen, began + given.limit - RESERVE_S)
    if bench.is_dry:
        return 1 if any(one.status in ("hung", "failed") for one in running.results) else 0
    return 0


def run_lanes(running: Run, checks: list[Check], until: float) -> None:
    """Run the lanes side by side, then the checks that want to be alone."""
    lanes: dict[str, list[Check]] = {}
    for check in checks:
        lanes.setdefault(check.lane, []).append(check)
    last = lanes.pop(ALONE, [])
    benches = {
        lane: replace(
            running.bench,
            processes=Processes(running.bench.processes.environ, running.bench.scratch),
        )
        for lane in [*lanes, ALONE]
    }

    def run_lane(lane: str, checks: list[Check]) -> None:
        for check in checks:
            result = running.check(check, until - time.monotonic(), benches[lane])
            print(
                f"{result.status:8} {result.seconds:5.1f} s  {check.name}: {result.words[:400]}",
                flush=True,
            )

    with ended_with_us([bench.processes for bench in benches.values()]):
        threads = [
            threading.Thread(target=run_lane, args=(lane, checks), daemon=True)
            for lane, checks in lanes.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run_lane(ALONE, last)


@contextlib.contextmanager
def ended_with_us(all_processes: list[Processes]) -> Iterator[None]:
    """End all processes of the checks when this one ends, also by SIGTERM."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        for processes in all_processes:
            processes.end_all()


def nothing_measured(why: str, machine: dict[str, Any], json_path: Path | None) -> int:
    """Report that there is no GPU."""
    report = Report("On a GPU", "", command(), left_out=[f"Nothing was measured on a GPU: {why}."])
    print(f"# {report.title}\n\n{report.left_out[0]}")
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(report, machine), indent=1), encoding="utf-8")
    return 0


def judged(check: Check, row: dict[str, Any]) -> Result:
    """Return the result of a check by what it found then."""
    result = Result(**row)
    if result.status in STATUSES.values():
        right, words = check.judge(result.finds)
        result = replace(result, status=STATUSES[right], words=plain(words), claim=check.claim)
    return result


def write(results: list[Path]) -> int:
    """Put the results of runs on a GPU into docs/performance.md and its data. What a later run says
    of a check counts.
    """
    import run_all

    found: dict[str, Any] = {}
    of_check: dict[str, dict[str, Any]] = {}
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not found.get("rows"):
            raise SystemExit(f"{path} holds no results: {' '.join(found.get('left_out', []))}")
        of_check |= {row["check"]: row for row in found["rows"]}
    # judged anew: the sentences of a check may have changed since
    results_now = [
        judged(check, of_check[check.name]) for check in CHECKS if check.name in of_check
    ]
    rows = [asdict(result) for result in results_now]
    report = report_of(results_now, found["about"])
    report.command = "python benchmarks/gpu_check.py"
    kept = json.loads(run_all.FIGURES.read_text(encoding="utf-8"))
    kept["gpu_check"] = {
        **found,
        **asdict(report),
        # what the checks found is too long to keep, but for the figures that are quoted
        "rows": [{**row, "finds": row["finds"] if row["check"] == "cost" else {}} for row in rows],
        "name": "gpu_check",
        "seconds": round(sum(row["seconds"] for row in rows)),
    }
    run_all.FIGURES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    page = run_all.page(
        [kept[benchmark.name] for benchmark in run_all.BENCHMARKS if benchmark.name in kept]
    )
    run_all.PAGE.write_text(page, encoding="utf-8")
    print(f"Wrote the section On a GPU of {run_all.PAGE}.")
    claims = [row["finds"]["facts"] for row in rows if row["finds"].get("facts")]
    if claims:
        answers = {**claims[0], "facts": [row for part in claims for row in part["facts"]]}
        on_nccl = FACTS.with_name(f"facts_on_{answers['facts'][0]['engine']}.json")
        on_nccl.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
        print(f"Wrote {on_nccl}; {FACTS} --write puts it into docs/nccl.md.")
    return 0


def main() -> int:
    """Do what the options ask for."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--prepare",
        type=Path,
        metavar="FOLDER",
        help="put the wheels for another machine into this folder",
    )
    parser.add_argument("--python-version", default="3.12", help="of that machine (default 3.12)")
    parser.add_argument(
        "--from", type=Path, dest="wheels", metavar="FOLDER", help="use the wheels in this folder"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--backend", default="nccl", help="nccl; gloo for a dry run")
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", help="run the checks whose names begin so"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="of the whole run (default 540)",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="write the results in these files to docs/performance.md",
    )
    given = parser.parse_args()
    if given.prepare is not None:
        prepare(given.prepare, given.python_version)
        return 0
    if given.write is not None:
        return write(given.write)
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
