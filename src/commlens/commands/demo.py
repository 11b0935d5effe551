"""``commlens demo``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from commlens.errors import CommandError, MissingDependency
from commlens.model.verdict import Verdict
from commlens.scenarios import DEFAULT, SCENARIOS, Ending, Scenario, Truth, find
from commlens.text import ranks_phrase

TIMEOUT_S = 180.0
"""No scenario takes longer, or something is wrong with this machine."""

DUMPED = "commlens: dump saved in"
"""How the watcher's line after a verdict begins."""


class DemoCommand:
    """Run a real multi-process job with one fault in it, and diagnose it.

    Small real programs over gloo on this machine's CPU, each with one fault at a known rank and line. You watch it train and hang
    (or die); then the launcher's watcher says which rank, which collective and which line did it, and ends the job. The exit
    status is 0 when that was the truth.
    """

    name = "demo"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("scenario", nargs="?", default=DEFAULT, help=f"which fault; {DEFAULT} by default")
        parser.add_argument("--list", action="store_true", help="name the scenarios and leave")
        parser.add_argument("--nproc-per-node", type=int, default=4, metavar="N", help="number of processes: 2, 4 or 8; 4 by default")
        parser.add_argument(
            "--stall-timeout", type=float, default=3.0, metavar="S", help="seconds until a wait is looked into; 3 by default"
        )
        parser.add_argument("--dump-dir", type=Path, metavar="DIR", help="keep the dump here; by default in a new temporary folder")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the job and compare the verdict with the truth."""
        if arguments.list:
            print_list()
            return 0
        scenario = find(arguments.scenario)
        world_size = arguments.nproc_per_node
        if world_size not in scenario.worlds:
            worlds = ", ".join(map(str, scenario.worlds))
            raise CommandError(f"The scenario {scenario.name} runs with {worlds} processes: --nproc-per-node {world_size} is none of them.")
        if importlib.util.find_spec("torch") is None:
            raise MissingDependency.torch("commlens demo")
        reason = scenario.impossible()
        if reason is not None:
            raise CommandError(f"The scenario {scenario.name} cannot run here. {reason}")
        dump_dir = arguments.dump_dir or Path(tempfile.mkdtemp(prefix="commlens-demo-"))
        introduce(scenario, world_size, arguments.stall_timeout)
        run_job(scenario, world_size, arguments.stall_timeout, dump_dir)
        return conclude(scenario, world_size, dump_dir, given=arguments.dump_dir is not None)


def print_list() -> None:
    """The scenarios in a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scenario", no_wrap=True)
    table.add_column("what happens")
    table.add_column("processes", no_wrap=True)
    for scenario in SCENARIOS:
        name = f"{scenario.name} *" if scenario.name == DEFAULT else scenario.name
        table.add_row(name, scenario.summary, ", ".join(map(str, scenario.worlds)))
    console = Console()
    console.print(table)
    console.print("\n* the default. Run one with: commlens demo SCENARIO", highlight=False)


def introduce(scenario: Scenario, world_size: int, stall_timeout: float) -> None:
    """Say what is about to happen."""
    print(f"commlens demo: {scenario.name} ({scenario.summary}), {world_size} processes over gloo, stall timeout {stall_timeout:g} s.")
    print(f"The program is {Path(__file__).parents[1] / 'scenarios' / 'programs' / scenario.program}.py\n", flush=True)


def run_job(scenario: Scenario, world_size: int, stall_timeout: float, dump_dir: Path) -> int:
    """Run it under ``commlens launch`` and wait for its end, showing its output as it comes.

    Returns:
        The exit status of ``commlens launch``.

    Raises:
        CommandError: it took longer than TIMEOUT_S.
    """
    command = [sys.executable, "-m", "commlens", "launch"]
    command += ["--stall-timeout", str(stall_timeout), "--on-stall", "abort", "--dump-dir", str(dump_dir)]
    command += ["--nproc-per-node", str(world_size), "-m", "commlens.scenarios", scenario.name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.stdout.isatty():  # what the launcher prints passes through a pipe
        environment.update(FORCE_COLOR="1", COLUMNS=str(shutil.get_terminal_size().columns))
    piped: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        subprocess.Popen(command, env=environment, text=True, errors="replace", start_new_session=True, **piped) as process,
        _ended_with_us(process),
    ):
        too_long = threading.Timer(TIMEOUT_S, _end, [process])
        too_long.start()
        try:
            assert process.stdout is not None
            left_out = show(process.stdout)
            status = process.wait()
        finally:
            in_time = too_long.is_alive()
            too_long.cancel()
    if not in_time:
        raise CommandError(f"The job did not end within {TIMEOUT_S:.0f} s; it was ended.", exit_code=1)
    if left_out:
        print(f"({left_out} lines in which torchrun reports the end of the job are left out.)")
    return status


def show(lines: Iterable[str]) -> int:
    """Print the job's output, but not the wall of text with which torchrun ends: it begins after the verdict.

    Returns:
        How many lines were left out.
    """
    told = False
    left_out = 0
    for line in lines:
        if told and not line.startswith("commlens:"):
            left_out += 1
            continue
        told = told or line.startswith(DUMPED)
        sys.stdout.write(line)
        sys.stdout.flush()
    return left_out


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens here (Ctrl-C included), nothing of the job is left."""
    try:
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _python_path() -> str:
    """The workers find this very commlens, installed or not."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))


def read_verdict(dump_dir: Path) -> Verdict | None:
    """What the newest dump says; None when nothing was dumped."""
    from commlens.diagnosis.conclusion import diagnose_logs
    from commlens.dumps.read import read_evidence

    jobs = sorted((path for path in dump_dir.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    if not jobs:
        return None
    evidence = read_evidence([jobs[-1]])
    return diagnose_logs(evidence.logs, problems=evidence.problems)


def differences(verdict: Verdict | None, truth: Truth) -> list[str]:
    """In what the verdict is not the truth, in sentences."""
    if verdict is None:
        return [] if truth.kinds == ("healthy",) else ["no fault was found"]
    found = []
    if verdict.kind not in truth.kinds:
        found.append(f"the verdict's kind is {verdict.kind}, the truth is {' or '.join(truth.kinds)}")
    if tuple(verdict.culprits) != truth.culprits:
        blamed = ranks_phrase(verdict.culprits) if verdict.culprits else "nobody"
        found.append(f"the verdict blames {blamed}, the truth is {ranks_phrase(truth.culprits) if truth.culprits else 'nobody'}")
    if truth.whys and verdict.why not in truth.whys:
        found.append(f"the verdict's reason is {verdict.why}, the truth is {' or '.join(truth.whys)}")
    if truth.ops and (verdict.collective is None or verdict.collective.op not in truth.ops):
        op = verdict.collective.op if verdict.collective else "none"
        found.append(f"the verdict's collective is {op}, the truth is {' or '.join(truth.ops)}")
    if truth.lines and verdict.source not in truth.lines:
        found.append(f"the verdict's line is {verdict.source}, the truth is {' or '.join(truth.lines)}")
    return found


def conclude(scenario: Scenario, world_size: int, dump_dir: Path, *, given: bool) -> int:
    """Compare with the truth and say what to try next. Returns the exit status."""
    verdict = read_verdict(dump_dir)
    wrong = differences(verdict, scenario.truth(world_size))
    print(flush=True)
    if wrong:
        print(f"This is not what the scenario holds: {'; '.join(wrong)}. Please report it, with the dump in {dump_dir}.")
        return 1
    if verdict is None:
        print("Nothing was wrong, and commlens said so by its silence.")
        if not given:
            with contextlib.suppress(OSError):
                dump_dir.rmdir()
    else:
        print("That is the truth: the fault was put there.")
        if scenario.ending is Ending.ENDS:
            print("The job itself had noticed nothing.")
    print("Next: `commlens demo --list` for other faults, or `commlens launch --nproc-per-node 4 train.py` for a job of your own.")
    return 0


__all__ = ["DemoCommand", "differences"]
