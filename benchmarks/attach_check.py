"""Ask ``commlens attach`` about jobs that hang under plain torchrun without commlens, and count
right, wrong and missing verdicts.

    python benchmarks/attach_check.py [--world 8] [--only NAME ...] [--write]

Each of the demo's scenarios that hang by themselves runs once. A verdict is right if it names the
scenario's ranks and one of its lines, wrong if it names another rank. A rank may stand at a later
line than that of the fault: "right rank". The time is the whole command's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from _report import machine, write_section

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from more_scenarios import SCENARIOS

from commlens import helper_process
from commlens.scenarios.registry import Scenario

ENDS_WITHOUT_COMMLENS = {
    "dies-exception",
    "dies-exit",
    "dies-hard-exit",
    "dies-sigkill",
    "dies-sigabrt",
}
START_S = 120.0
LONGEST_PROGRESS_S = 6.0  # the scenarios' steps are shorter


class Answer(NamedTuple):
    """What attach said of one job."""

    word: str  # right, right rank (at another line), wrong, none, ended
    kind: str
    confidence: str
    seconds: float
    summary: str


def cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds that these processes have used."""
    found = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    with contextlib.suppress(OSError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def hangs(job: subprocess.Popen[bytes], log: Path, world: int) -> bool:
    """Wait until nothing is printed any more by a job whose ranks have all begun. Return False if
    it ends.
    """
    end, size, since = time.monotonic() + START_S, -1, time.monotonic()
    while job.poll() is None and time.monotonic() < end:
        time.sleep(0.25)
        begun = len(children(job.pid)) >= world and cpu_s(children(job.pid)) > world * 1.0
        if not begun or log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        if begun and time.monotonic() - since > LONGEST_PROGRESS_S and size >= 0:
            return True
    return False


def ask(scenario: Scenario, world: int, folder: Path) -> Answer:
    """Run a scenario until it hangs, and ask."""
    log = folder / "log"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COMMLENS")
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
        "-m",
        scenario.package,
    ]
    with log.open("wb") as output:
        job = subprocess.Popen(
            [*command, scenario.name],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                **environment,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{helper_process.python_path()}:{sys.path[0]}",
            },
            start_new_session=True,
        )
    ranks: list[int] = []
    try:
        if not hangs(job, log, world):
            return Answer("ended", "", "", 0.0, log.read_text(errors="replace")[-300:])
        ranks = children(job.pid)
        began = time.monotonic()
        asked = subprocess.run(
            [sys.executable, "-m", "commlens", "attach", str(job.pid), "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return judge(scenario, world, asked, time.monotonic() - began)
    finally:
        for pid in [*ranks, job.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def judge(
    scenario: Scenario, world: int, asked: subprocess.CompletedProcess[str], seconds: float
) -> Answer:
    """Hold a verdict against the truth."""
    if not asked.stdout.strip():
        return Answer("none", f"exit {asked.returncode}", "", seconds, asked.stderr.strip())
    verdict: dict[str, Any] = json.loads(asked.stdout)
    truth = scenario.truth(world)
    line = str(verdict["source"] or "").rpartition("/")[2]
    if set(verdict["culprits"]) - set(truth.culprits):
        word = "wrong"
    elif verdict["culprits"]:
        word = "right" if line in truth.lines else "right rank"
    else:
        word = "none"
    return Answer(
        word, verdict["kind"], verdict["confidence"], seconds, f"{line} {verdict['summary']}"
    )


def main() -> None:
    """Ask about all, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--write", action="store_true", help="write the table into docs/attach.md")
    asked = parser.parse_args()
    rows = []
    for scenario in SCENARIOS:
        world = asked.world if asked.world in scenario.worlds else max(scenario.worlds)
        wanted = (
            scenario.name in asked.only
            if asked.only
            else scenario.fault is not None and scenario.name not in ENDS_WITHOUT_COMMLENS
        )
        if not wanted or scenario.impossible() is not None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            answer = ask(scenario, world, Path(folder))
        print(
            f"{scenario.name:24} {answer.word:6} {answer.kind:18} {answer.confidence:7}"
            f" {answer.seconds:5.1f} s  {answer.summary}",
            flush=True,
        )
        if answer.word != "ended":
            rows.append((scenario.name, world, answer))
    words = [answer.word for _, _, answer in rows]
    lines = [
        f"| {name} | {world} | {answer.word} | {answer.kind}, {answer.confidence} |"
        f" {answer.seconds:.1f} s |"
        for name, world, answer in rows
    ]
    slowest = max((answer.seconds for _, _, answer in rows), default=0.0)
    counts = (
        f"Of {len(words)}: {words.count('right')} right, {words.count('right rank')} with the right"
        f" rank at another line, {words.count('wrong')} wrong, {words.count('none')} without a rank"
    )
    heading = (
        "| job that hangs | ranks | | kind, confidence | answered in |\n|---|---:|---|---|---:|"
    )
    text = (
        f"{counts}; the slowest answer took {slowest:.1f} s. {machine()}\n\n{heading}\n"
        + "\n".join(lines)
    )
    print(text)
    if asked.write:
        write_section(Path(__file__).resolve().parents[1] / "docs" / "attach.md", "measured", text)


if __name__ == "__main__":
    main()
