"""``commlens demo``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from commlens import helper_process
from commlens.commands.table import print_table
from commlens.errors import CommandError, require_torch
from commlens.model.verdict import Verdict
from commlens.scenarios import DEFAULT, SCENARIOS, Ending, Scenario, Truth, find
from commlens.text import ranks_phrase
from commlens.watch.reporting import NOTICE_INDENT

TIMEOUT_S = 180.0  # more than any scenario takes
DUMPED = "commlens: dump saved in"  # the beginning of the watcher's line after a verdict


class DemoCommand:
    """Run a real multi-process job with one fault in it, and diagnose it.

    Each scenario is a small real program over gloo on this machine's CPU, with one fault at a known
    rank and line. You see it train and then hang or die. The launcher's watcher names the rank, the
    collective and the line, and ends the job. Exit status: 0 the verdict was correct, 1 it was not,
    2 wrong usage.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("scenario", nargs="?", help=f"the scenario to run (default: {DEFAULT})")
        parser.add_argument("--list", action="store_true", help="list the scenarios and exit")
        parser.add_argument(
            "--nproc-per-node",
            type=int,
            default=4,
            metavar="N",
            help="start N processes: 2, 4 or 8 (default: 4)",
        )
        parser.add_argument(
            "--stall-timeout",
            type=float,
            default=3.0,
            metavar="S",
            help="diagnose a stalled collective after S seconds (default: 3)",
        )
        parser.add_argument(
            "--dump-dir",
            type=Path,
            metavar="DIR",
            help="save the dump here (default: a new temporary folder)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.list:
            print_list()
            return 0
        scenario = find(arguments.scenario or DEFAULT)
        world_size = arguments.nproc_per_node
        if world_size not in scenario.worlds:
            worlds = ", ".join(map(str, scenario.worlds))
            raise CommandError(
                f"The scenario {scenario.name} runs with {worlds} processes, not {world_size}:"
                " change --nproc-per-node."
            )
        require_torch("commlens demo")
        reason = scenario.impossible()
        if reason is not None:
            if arguments.scenario is not None:
                raise CommandError(f"The scenario {scenario.name} cannot run here. {reason}")
            print(
                f"The scenario {scenario.name} cannot run here. {reason} Another one runs in its"
                " place."
            )
            scenario = first_possible(world_size)
        dump_dir = arguments.dump_dir or Path(tempfile.mkdtemp(prefix="commlens-demo-"))
        introduce(scenario, world_size, arguments.stall_timeout)
        run_job(scenario, world_size, arguments.stall_timeout, dump_dir)
        return conclude(scenario, world_size, dump_dir, given=arguments.dump_dir is not None)


def first_possible(world_size: int) -> Scenario:
    """Return the first scenario with a fault that can run here."""
    return next(
        each
        for each in SCENARIOS
        if each.fault and world_size in each.worlds and each.impossible() is None
    )


def print_list() -> None:
    """Print a table of the scenarios."""
    rows = [
        (
            f"{each.name} *" if each.name == DEFAULT else each.name,
            each.summary,
            ", ".join(map(str, each.worlds)),
        )
        for each in SCENARIOS
    ]
    print_table(rows, headings=("scenario", "what happens", "processes"))
    print("\n* the default. Run one with: commlens demo SCENARIO")


def introduce(scenario: Scenario, world_size: int, stall_timeout: float) -> None:
    """Print which scenario runs, and where its program is."""
    print(
        f"commlens demo: {scenario.name} ({scenario.summary}), {world_size} processes over gloo,"
        f" stall timeout {stall_timeout:g} s."
    )
    print(f"The program is {scenario.path}\n", flush=True)


def run_job(scenario: Scenario, world_size: int, stall_timeout: float, dump_dir: Path) -> int:
    """Run a scenario under ``commlens launch`` until it ends, show its output, and return the exit
    status.
    """
    command = [
        *(sys.executable, "-m", "commlens", "launch"),
        *("--stall-timeout", str(stall_timeout), "--abort-on", "stall"),
        *("--dump-dir", str(dump_dir), "--nproc-per-node", str(world_size)),
        *("-m", scenario.package, scenario.name),
    ]
    environment = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "COMMLENS_AUTO_BUILD": "0",
        "PYTHONPATH": helper_process.python_path(),
    }
    if sys.stdout.isatty():  # the launcher's output passes through a pipe
        environment.update(FORCE_COLOR="1", COLUMNS=str(shutil.get_terminal_size().columns))
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        too_long = threading.Timer(TIMEOUT_S, _end, [process])
        try:
            too_long.start()
            assert process.stdout is not None
            left_out = show(process.stdout)
            status = process.wait()
        finally:
            in_time = too_long.is_alive()
            too_long.cancel()
            _end(process)  # leaves no process of the job behind, even after Ctrl-C
    if not in_time:
        raise CommandError(
            f"The job did not end within {TIMEOUT_S:.0f} s, so it was killed.", exit_code=1
        )
    if left_out:
        print(f"(torchrun's own report on the end of the job, {left_out} lines, is left out.)")
    return status


def show(lines: Iterable[str]) -> int:
    """Print the job's output, without torchrun's long report after the verdict. Returns how many
    lines were left out.
    """
    has_verdict = ours = False
    left_out = 0
    for line in lines:
        ours = line.startswith("commlens:") or (ours and line.startswith(NOTICE_INDENT))
        if has_verdict and not ours:
            left_out += 1
            continue
        has_verdict = has_verdict or line.startswith(DUMPED)
        sys.stdout.write(line)
        sys.stdout.flush()
    return left_out


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def read_verdict(dump_dir: Path) -> Verdict | None:
    """Diagnose the newest dump. None if there is no dump."""
    from commlens.diagnosis.examine import diagnose_logs
    from commlens.dumps.read import read_evidence

    jobs = sorted(
        (path for path in dump_dir.glob("*") if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    if not jobs:
        return None
    evidence = read_evidence([jobs[-1]])
    return diagnose_logs(evidence.logs, problems=evidence.problems)


def differences(verdict: Verdict | None, truth: Truth) -> list[str]:
    """Return how the verdict differs from the known fault, in clauses."""
    if verdict is None:
        return [] if truth.kinds == ("healthy",) else ["no fault was found"]
    values = {
        "kind": verdict.kind,
        "reason": verdict.why,
        "collective": verdict.collective.op if verdict.collective else "none",
        "line": verdict.source,
    }
    expected = {
        "kind": truth.kinds,
        "reason": truth.whys,
        "collective": truth.ops,
        "line": truth.lines,
    }
    wrong = [name for name, right in expected.items() if right and values[name] not in right]
    found = [
        f"the verdict's {name} is {values[name]} instead of {' or '.join(expected[name])}"
        for name in wrong
    ]
    if tuple(verdict.culprits) != truth.culprits:
        blamed, culprits = (
            ranks_phrase(ranks) if ranks else "no rank"
            for ranks in (verdict.culprits, truth.culprits)
        )
        found.append(f"the verdict blames {blamed} instead of {culprits}")
    return found


def conclude(scenario: Scenario, world_size: int, dump_dir: Path, *, given: bool) -> int:
    """Compare the verdict with the known fault, and print what to try next. Returns the exit
    status.
    """
    verdict = read_verdict(dump_dir)
    wrong = differences(verdict, scenario.truth(world_size))
    print(flush=True)
    if wrong:
        print(
            f"The verdict is wrong: {'; '.join(wrong)}. Please report it with the dump in"
            f" {dump_dir}."
        )
        return 1
    if verdict is None:
        print("The scenario has no fault, and commlens reported none.")
        if not given:
            with contextlib.suppress(OSError):
                dump_dir.rmdir()
    else:
        print("The verdict is correct: this is the fault in the scenario.")
        if scenario.ending is Ending.ENDS:
            print("The job itself ended without an error.")
    print(
        "Next: `commlens demo --list` lists other faults; `commlens launch --nproc-per-node 4"
        " train.py` runs your own job."
    )
    return 0
