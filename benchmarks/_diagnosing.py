"""Shared by the benchmarks of diagnosis: run commlens and torchfrtrace on the same files, and grade
their answers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dumpgen import Truth

from commlens.errors import CommlensError
from commlens.model.verdict import Verdict

GRADES = ("right", "vague", "wrong", "silent", "crashed")
TORCHFRTRACE = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]


@dataclass
class Answer:
    """A tool's answer for a set of files."""

    culprits: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()  # of its root causes; torchfrtrace's are not compared
    fault: bool = False  # whether it says that something is wrong
    crashed: str = ""  # the last line of it
    text: str = ""
    seconds: float = 0.0


def of_verdict(verdict: Verdict) -> Answer:
    """Return the culprits of all root causes."""
    roots = [finding for finding in verdict.findings if finding.root_cause] or [verdict]
    return Answer(
        culprits=tuple(sorted({rank for finding in roots for rank in finding.culprits})),
        kinds=tuple(finding.kind for finding in roots),
        fault=verdict.is_fault,
        text=verdict.summary,
    )


def commlens(folder: Path) -> Answer:
    """Return the answer of ``commlens.diagnose(folder)``."""
    from commlens.diagnosis.api import diagnose

    began = time.monotonic()
    try:
        answer = of_verdict(diagnose(folder))
    except CommlensError as error:
        answer = Answer(crashed=str(error).splitlines()[0])
    except Exception as error:
        answer = Answer(crashed=f"{type(error).__name__}: {error}")
    answer.seconds = time.monotonic() - began
    return answer


def torchfrtrace(folder: Path, prefix: str, *, complete: bool, limit_s: float = 900) -> Answer:
    """Return the answer of torch's own analyzer. Without ``complete``, dumps of some ranks are
    missing, which it has to be told.
    """
    began = time.monotonic()
    command = [
        *TORCHFRTRACE,
        str(folder),
        "-p",
        prefix,
        *([] if complete else ["--allow-incomplete-ranks"]),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Answer(crashed=f"no answer within {limit_s:.0f} s", seconds=limit_s)
    text = done.stdout + done.stderr
    blamed = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)}
    for group in re.findall(r"missing ranks: \{([^}]*)\}", text):
        blamed |= {int(rank) for rank in group.split(",") if rank.strip()}
    return Answer(
        culprits=tuple(sorted(blamed)),
        fault=bool(blamed) or "has errors" in text or "Not all ranks joining" in text,
        crashed=(text.strip().splitlines() or ["no output"])[-1] if done.returncode else "",
        text=text,
        seconds=time.monotonic() - began,
    )


def grade(answer: Answer, truth: Truth, *, kinds: bool = True) -> str:
    """Grade an answer.

    ``right``: exactly the true culprits and, with ``kinds``, a true kind for each root cause; no
    fault for a healthy job. ``vague``: the true culprits and other ranks, only some of them, the
    right ones with a wrong kind, or a fault without a culprit. ``wrong``: other ranks are blamed,
    or a fault is found in a healthy job. ``silent``: the fault is not found. ``crashed``: no
    answer.
    """
    if answer.crashed:
        return "crashed"
    true_sets = [set(truth.culprits), *map(set, truth.also)]
    blamed = set(answer.culprits)
    if truth.kinds == ("healthy",):
        return "wrong" if answer.fault else "right"
    kind_is_true = not kinds or set(answer.kinds) <= set(truth.kinds)
    if blamed in true_sets and kind_is_true and (answer.fault or blamed):
        return "right"
    if not blamed:
        return "vague" if answer.fault else "silent"
    return (
        "vague"
        if any(true and (blamed <= true or true <= blamed) for true in true_sets)
        else "wrong"
    )


def tell(text: str, rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print a table, and write it and its data as ``--markdown`` and ``--json`` say."""
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


# --- cost


@dataclass
class Cost:
    """The cost of a command, including its children."""

    cpu_s: float
    wall_s: float
    peak_mb: float  # proportional set sizes of all its processes at one moment
    status: int
    text: str = field(repr=False, default="")

    def as_row(self) -> dict[str, float]:
        """Return the cost for JSON."""
        return {
            "cpu_s": round(self.cpu_s, 3),
            "wall_s": round(self.wall_s, 3),
            "peak_mb": round(self.peak_mb, 1),
        }


def measure(
    command: Sequence[str], *, limit_s: float = 1800, environment: dict[str, str] | None = None
) -> Cost:
    """Run a command alone, and measure its cost."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    peaks = [0.0]
    finished = threading.Event()
    watch = threading.Thread(target=_watch_memory, args=(process.pid, peaks, finished))
    watch.start()
    killer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    killer.start()
    assert process.stdout is not None
    with process.stdout as pipe:
        text = pipe.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    killer.cancel()
    finished.set()
    watch.join()
    # of the largest single process: what the looks may have missed
    peaks.append(usage.ru_maxrss / 1024)
    return Cost(usage.ru_utime + usage.ru_stime, wall, max(peaks), process.returncode, text)


def _watch_memory(pid: int, peaks: list[float], finished: threading.Event) -> None:
    while not finished.wait(0.1):
        total = 0.0
        for child in _family(pid):
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{child}/smaps_rollup").read_text(encoding="utf-8").splitlines()
                total += (
                    int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
                )
        peaks[0] = max(peaks[0], total)


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    family = [pid]
    for member in family:
        with suppress(OSError):
            for thread in Path(f"/proc/{member}/task").iterdir():
                family += [
                    int(child)
                    for child in (thread / "children").read_text(encoding="utf-8").split()
                ]
    return family
