"""Run one program of the soak as a user would, and judge what commlens says about it."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _soak_program import GLOO, NCCL_LIKE, Program, Truth, generate

TESTS = Path(__file__).parents[1] / "tests"
NCCL_LIKE_SHARE = 1 / 3  # of the jobs, if both backends are asked for

DUMPS = "commlens-dumps"
START_S = 120  # how long the ranks may take to start on a loaded machine
STEPS_S = 60  # how long they may take to come to the fault
END_S = 45  # how long a launcher may take to end: torchrun gives its workers 30 s

NO_FAULT = ("waiting", "healthy", "undetermined", "straggler")

OUTCOMES = {
    "right": (
        "the rank is named, and no other; nobody, if two halves disagree; a healthy job without a"
        " word"
    ),
    "undecided": "nobody is named, where the evidence does not tell who is wrong",
    "no effect": "the fault changed nothing that could be seen, and the job ended",
    "other kind": "the rank is named, with another kind of fault",
    "unnamed": "a fault is told, but not the rank",
    "silence": "no verdict in spite of a fault",
    "wrong rank": "an innocent rank is named",
    "false word": "a verdict on a healthy job",
    "harm": (
        "the exit status or the results differ from those of the bare job, or commlens has an error"
        " of its own"
    ),
    "leftover": "processes or black boxes are left behind",
}
FINE = ("right", "undecided", "no effect")


@dataclass(frozen=True)
class Setting:
    """How a job is run."""

    mode: str  # launch, env (COMMLENS=1 torchrun), run (torchrun -m commlens run)
    stall_timeout_s: float
    variables: dict[str, str]

    def __str__(self) -> str:
        return " ".join(
            [
                self.mode,
                *(
                    f"{name.removeprefix('COMMLENS_').lower()}={value}"
                    for name, value in self.variables.items()
                ),
            ]
        )


@dataclass
class Outcome:
    """What became of a job."""

    program: Program
    setting: Setting
    outcome: str = ""
    why: str = ""
    verdicts: list[dict[str, Any]] = field(default_factory=list)  # as JSON, in order
    text: str = ""  # all output
    exit_status: int | None = None  # None: the soak ended it
    seconds: float = 0.0
    leftovers: list[str] = field(default_factory=list)


def draw(seed: int, backend: str) -> tuple[Program, Setting]:
    """Return the program and the settings of a seed. The seed draws the backend, too, if it is
    "both".
    """
    rng = random.Random(-1 - seed)
    stall_timeout_s = rng.choice([3.0, 5.0, 8.0])
    variables = {
        "COMMLENS_STALL_TIMEOUT": f"{stall_timeout_s:g}",
        "COMMLENS_ENGINE": rng.choice(["python", "native"]),
        "COMMLENS_ABORT_ON": rng.choice(
            ["nothing", "nothing", "stall", "stall", "mismatch", "stall,mismatch"]
        ),
        "COMMLENS_DEBUG_MODE": rng.choice(["0", "0", "0", "1"]),
    }
    setting = Setting(rng.choice(["launch", "env", "run"]), stall_timeout_s, variables)
    if backend == "both":
        backend = NCCL_LIKE if rng.random() < NCCL_LIKE_SHARE else GLOO
    return generate(seed, stall_timeout_s, backend), setting


@functools.cache
def nccl_like() -> dict[str, str]:
    """Build the backend that behaves as NCCL does, and return the variables that make a program use
    it.

    Raises:
        RuntimeError: it cannot be built here.
    """
    sys.path.append(str(TESTS))
    try:
        import nccl_like
    finally:
        sys.path.remove(str(TESTS))
    engine = os.environ.get(nccl_like.ENGINE, "nccl")
    if why_not := nccl_like.why_not(engine):
        raise RuntimeError(why_not)
    path = os.pathsep.join(
        [str(nccl_like.HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    variables = {**nccl_like.variables(engine), "PYTHONPATH": path}
    # Without this, a process whose collective timed out waits a minute before it ends.
    return {**variables, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "300"}


class Job:
    """One job in a folder of its own.

    Args:
        program: to run.
        setting: how; None: bare.
        folder: for its files, which must not exist.
    """

    def __init__(self, program: Program, setting: Setting | None, folder: Path) -> None:
        self.program, self.setting, self.folder = program, setting, folder
        self.boxes = Path("/dev/shm") / f"commlens-soak-{os.getpid()}-{program.seed}-{folder.name}"
        self.mark = f"COMMLENS_BOX_DIR={self.boxes}"
        (folder / "pids").mkdir(parents=True)
        (folder / "train.py").write_text(program.source)
        self.verdicts: list[dict[str, Any]] = []
        self._seen: set[str] = set()

    def run(self) -> Outcome:
        """Run the job to its end, or until nothing more is expected of it."""
        began = time.monotonic()
        with (self.folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                self._command(),
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended_by_us = not self._wait(process, began)
            leftovers = self._end(process, ended_by_us=ended_by_us)
        self._read_verdicts()
        text = (self.folder / "output.txt").read_text(errors="replace")
        status = None if ended_by_us else process.returncode
        setting = self.setting or Setting("bare", 0, {})
        return Outcome(
            self.program,
            setting,
            verdicts=self.verdicts,
            text=text,
            exit_status=status,
            seconds=time.monotonic() - began,
            leftovers=leftovers,
        )

    def _command(self) -> list[str]:
        workers = ["--nproc-per-node", str(self.program.size), "--standalone"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *workers]
        mode = self.setting.mode if self.setting else "bare"
        if mode == "launch":
            return [sys.executable, "-m", "commlens", "launch", *workers, "train.py"]
        return [*torchrun, *(["-m", "commlens", "run"] if mode == "run" else []), "train.py"]

    def _environment(self) -> dict[str, str]:
        usual = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("COMMLENS") or name == "COMMLENS_NATIVE_DIR"
        }
        ours = {
            "COMMLENS_BOX_DIR": str(self.boxes),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }
        if self.program.backend == NCCL_LIKE:
            ours |= {
                **nccl_like(),
                "TORCH_FR_DUMP_TEMP_FILE": str(self.folder.absolute() / "nccl_trace_rank_"),
            }
            # else dumps are saved beside those of torch's recorder
            ours["COMMLENS_DUMP_DIR"] = DUMPS
        if self.setting is None:
            return usual | ours
        return (
            usual
            | ours
            | self.setting.variables
            | ({"COMMLENS": "1"} if self.setting.mode == "env" else {})
        )

    def _wait(self, process: subprocess.Popen[bytes], began: float) -> bool:
        """Return whether the job ended by itself. Send the signal that the truth asks for."""
        truth = self.program.truth
        stall_s = self.setting.stall_timeout_s if self.setting else 5
        patience_s = (
            STEPS_S
            + truth.after_s
            + stall_s * (20 if truth.slow else 6)
            + (60 if truth.fault == "none" else 0)
        )
        told_at = 0.0
        signalled = not truth.by_runner
        started_at: float | None = None
        while (now := time.monotonic()) < (started_at or began + START_S) + patience_s:
            if process.poll() is not None:
                return True
            if started_at is None and self._pid() is not None:
                started_at = now
            if not signalled and started_at is not None and now - started_at >= truth.after_s:
                signalled = True
                with suppress(OSError):
                    os.kill(self._pid() or 0, getattr(signal, truth.by_runner))
            if self.setting is not None:
                self._read_verdicts()
                if self.verdicts and not told_at:
                    told_at = now
                # another verdict, a wrong one perhaps, would have come by now
                if told_at and now - told_at > stall_s + 3:
                    return False
            time.sleep(0.1)
        return False

    def _pid(self) -> int | None:
        with suppress(OSError, ValueError):
            return int((self.folder / "pids" / str(self.program.truth.culprit)).read_text())
        return None

    def _read_verdicts(self) -> None:
        """Add each verdict that was saved: a later one overwrites an earlier one's file."""
        for path in sorted(self.folder.glob(f"{DUMPS}/*/verdict.json")):
            with suppress(OSError, ValueError):
                text = path.read_text()
                verdict = json.loads(text)
                key = json.dumps(
                    [
                        verdict["kind"],
                        verdict["culprits"],
                        verdict.get("collective"),
                        verdict["summary"],
                    ]
                )
                if key not in self._seen:
                    self._seen.add(key)
                    self.verdicts.append(verdict)

    def _end(self, process: subprocess.Popen[bytes], *, ended_by_us: bool) -> list[str]:
        """End the job as Ctrl-C does, and return what is left of it then."""
        if ended_by_us:
            for pid in self._processes():
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            with suppress(OSError):
                process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        end = time.monotonic() + 10
        while (left := [*self._processes()]) and time.monotonic() < end:
            time.sleep(0.2)
        # SIGTERM ends a rank, but not the child that the fault made it start.
        found = [
            f"process {pid} {_command_line(pid)}"
            for pid in left
            if not _command_line(pid).startswith("sleep 600")
        ]
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        found += [f"file {path}" for path in self.boxes.rglob("*") if path.is_file()]
        shutil.rmtree(self.boxes, ignore_errors=True)
        return found

    def _processes(self) -> Iterator[int]:
        """Yield the processes of this job, by their environment."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name)


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:100]
        )
    return ""


def try_seed(seed: int, folder: Path, backend: str) -> Outcome:
    """Run a seed's program, bare too if it is healthy, and judge the outcome."""
    program, setting = draw(seed, backend)
    job = Job(program, setting, folder / "recorded")
    outcome = job.run()
    bare = Job(program, None, folder / "bare").run() if program.truth.fault == "none" else None
    outcome.outcome, outcome.why = judge(program.truth, outcome, bare)
    return outcome


def judge(truth: Truth, outcome: Outcome, bare: Outcome | None) -> tuple[str, str]:
    """Return the outcome and its reason."""
    errors = re.findall(
        r"^.*(?:File \".*/src/commlens/.*|commlens.* failed.*)$", outcome.text, re.MULTILINE
    )
    # raised by commlens on purpose, through its own frames
    refused = "DistributedOperationException" in outcome.text
    faults = [verdict for verdict in outcome.verdicts if verdict["kind"] not in NO_FAULT]
    told = len(re.findall(r"^(?:\[.*\]:)?VERDICT", outcome.text, re.MULTILINE))
    if truth.fault == "none":
        if "terminate called" in outcome.text and _crashed_on_exit(outcome, faults):
            return "right", ""
        if told or faults:
            return "false word", "; ".join(verdict["summary"] for verdict in faults)
        if (
            bare is not None
            and bare.exit_status == 0
            and (outcome.exit_status, _results(outcome)) != (bare.exit_status, _results(bare))
        ):
            return (
                "harm",
                (
                    f"exit status {outcome.exit_status}, bare {bare.exit_status}; results"
                    f" {_results(outcome)}, bare {_results(bare)}"
                ),
            )
    blamed = [_blamed(verdict) for verdict in faults]
    if (innocent := set().union(*blamed) - {truth.culprit}) and not (
        truth.either and all(len(ranks) < 2 for ranks in blamed)
    ):
        return "wrong rank", f"ranks {sorted(innocent)} instead of {truth.culprit}"
    # else the soak interrupted the job, wherever it was
    if errors and not refused and outcome.exit_status is not None:
        return "harm", errors[0]
    if outcome.leftovers:
        return "leftover", "; ".join(outcome.leftovers)
    if truth.fault == "none":
        return "right", ""
    if not faults:
        if truth.silent and outcome.exit_status == 0:
            return "no effect", ""
        return "silence", f"exit status {outcome.exit_status}, {told} verdicts printed"
    named = [verdict for verdict, ranks in zip(faults, blamed, strict=True) if ranks]
    if not named and truth.culprit < 0:
        return "right", ""
    if not named:
        return (
            ("undecided", "")
            if truth.undecided or truth.either
            else ("unnamed", faults[0]["summary"])
        )
    if not any(verdict["kind"].startswith(truth.kinds) for verdict in named):
        return "other kind", named[0]["summary"]
    return "right", ""


def _crashed_on_exit(outcome: Outcome, faults: list[dict[str, Any]]) -> bool:
    """Return whether the only verdict is on a rank that torch crashed on exit, after all had
    printed their results.
    """
    words = [verdict["summary"].endswith("while it was exiting") for verdict in faults]
    return words == [True] and len(_results(outcome)) == outcome.program.size


def _blamed(verdict: dict[str, Any]) -> set[int]:
    """Return the culprits of all root causes."""
    roots = [finding for finding in verdict["findings"] if finding["root_cause"]] or [verdict]
    return {
        rank for finding in roots if finding["kind"] not in NO_FAULT for rank in finding["culprits"]
    }


def _results(outcome: Outcome) -> list[str]:
    return sorted(re.findall(r"rank \d+ result \S+", outcome.text))
