"""Runs scenarios as jobs of real processes over real gloo, watched as the launcher watches, and
shows everything when one goes wrong.

The ranks are forks of one process that has imported torch already (``zygote.py``). Nothing is left
behind: every process that was started is killed at the end, and the job's folder of black boxes is
looked for afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zygote_client import Zygote, has_ended

from commlens.blackbox import job_dirs
from commlens.config import NOTHING, Settings, settings_environment
from commlens.dumps.read import read_evidence
from commlens.dumps.save import discard_job
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.processes.ranks import RankProcess
from commlens.scenarios import Scenario, find
from commlens.watch.watcher import Watcher

HERE = Path(__file__).parent
STALL_TIMEOUT_S = 2.0
JOB_TIMEOUT_S = 50.0
MONITOR_S = 0.1  # torchrun looks at its workers this often
_numbers = itertools.count(1)


@dataclass
class JobResult:
    """What became of a job."""

    scenario: str
    world_size: int
    exits: dict[int, int] = field(default_factory=dict)  # exit status, or minus the signal's number
    outputs: dict[int, str] = field(default_factory=dict)
    # Unix time, what the watcher said
    said: list[tuple[float, str | Verdict]] = field(default_factory=list)
    verdict: Verdict | None = None  # the last one that it printed
    dump: Path | None = None
    boxes_left: list[Path] = field(default_factory=list)
    seconds: float = 0.0
    timed_out: bool = False

    @property
    def verdicts(self) -> list[Verdict]:
        """All that was printed, in order."""
        return [what for _, what in self.said if isinstance(what, Verdict)]

    @property
    def lines(self) -> list[str]:
        """The watcher's other lines."""
        return [what for _, what in self.said if isinstance(what, str)]

    def logs(self) -> list[RankLog]:
        """What the dump holds."""
        return read_evidence([self.dump]).logs if self.dump is not None else []

    def results(self) -> list[str]:
        """The lines in which the program says what it computed."""
        wanted = ("step ", "rank ")
        return [
            line
            for rank in sorted(self.outputs)
            for line in self.outputs[rank].splitlines()
            if line.startswith(wanted)
        ]

    def __str__(self) -> str:
        parts = [
            f"{self.scenario} at {self.world_size} ranks, {self.seconds:.1f} s, exits {self.exits},"
            f" timed out: {self.timed_out}"
        ]
        for at, what in self.said:
            parts.append(
                f"--- said at {at:.2f}\n{shown(what) if isinstance(what, Verdict) else what}"
            )
        for rank, text in sorted(self.outputs.items()):
            parts.append(f"--- output of rank {rank}, the last 3000 characters\n{text[-3000:]}")
        return "\n".join(parts)


def shown(verdict: Verdict) -> str:
    """The verdict as a user sees it."""
    import io

    from commlens.reports.terminal import print_verdict

    text = io.StringIO()
    print_verdict(verdict, file=text, width=120, colour=False)
    return text.getvalue()


def start_ticks(pid: int) -> int:
    return job_dirs.start_ticks(pid)


class Harness:
    """Starts jobs, whose ranks the zygote forks."""

    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote

    def run_job(
        self,
        scenario: Scenario,
        world_size: int,
        folder: Path,
        *,
        settings: Settings | None = None,
        recorded: bool = True,
        detached: bool = False,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = JOB_TIMEOUT_S,
        arguments: Sequence[str] = (),
    ) -> JobResult:
        """Run one scenario to its end, its abort or the timeout.

        Args:
            scenario: which.
            world_size: number of ranks.
            folder: for outputs and dumps.
            settings: for the ranks and the watcher; by default, a stall of STALL_TIMEOUT_S ends the
                job.
            recorded: False runs it without commlens.
            detached: nobody watches from here: the lowest rank starts the watcher, as with
                COMMLENS=1. Its words are in that rank's output.
            environment: more variables for every rank.
            timeout_s: after which everything is killed.
            arguments: of Python, for another program than the scenario.
        """
        began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        job = f"test-{scenario.name}-{world_size}-{os.getpid()}-{next(_numbers)}"
        settings = settings or Settings(stall_timeout=STALL_TIMEOUT_S)
        settings = replace(
            settings,
            abort_on="stall" if settings.abort_on == NOTHING else settings.abort_on,
            job=job,
            watched=not detached,
            dump_dir=str(folder / "dumps"),
        )
        result = JobResult(scenario.name, world_size)
        common = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "TORCHELASTIC_RUN_ID": job,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TMPDIR": str(folder),
            **({**settings_environment(settings), "COMMLENS": "1"} if recorded else {}),
            **(environment or {}),
        }
        ranks = [
            {
                "environment": {**common, "RANK": str(r), "LOCAL_RANK": str(r), "GROUP_RANK": "0"},
                "arguments": list(arguments) or ["-m", scenario.package, scenario.name],
            }
            for r in range(world_size)
        ]
        started = self.zygote.ask(do="start", folder=str(folder), store=True, ranks=ranks)
        pids: list[int] = started["pids"]
        workers = [
            RankProcess(r, pid, start_ticks(pid), world_size, r) for r, pid in enumerate(pids)
        ]

        def end_job(_: str) -> None:
            _await_native_dumps(common)
            kill(pids, signal.SIGTERM)

        watcher = None
        thread = None
        roots = [job_dirs.user_folder(root) / job for root in job_dirs.box_roots(settings.box_dir)]
        if recorded and not detached:
            watcher = Watcher(
                roots,
                settings,
                say=lambda what: result.said.append((time.time(), what)),
                workers=lambda: workers,
                end_job=end_job,
            )
            thread = threading.Thread(target=watcher.run, name="watcher")
            thread.start()
        try:
            result.timed_out = not _await_end(pids, began + timeout_s)
        finally:
            kill(pids, signal.SIGKILL)
            if watcher is not None and thread is not None:
                _await_end(pids, time.monotonic() + 5)
                watcher.stop()
                thread.join(15)
                assert not thread.is_alive(), "The watcher did not come to an end."
                result.verdict, result.dump = watcher.reporter.verdict, watcher.reporter.dump
            elif recorded:
                _await_watchers(roots, time.monotonic() + 20)
            kill([started["store"]], signal.SIGKILL)
            statuses = self.zygote.reap([*pids, started["store"]])
        result.seconds = time.monotonic() - began
        for rank, pid in enumerate(pids):
            result.exits[rank] = os.waitstatus_to_exitcode(statuses[pid])
            result.outputs[rank] = (folder / f"rank{rank}.out").read_text(errors="replace")
        if recorded:
            result.boxes_left = [box for root in roots for box in job_dirs.boxes(root)]
            for root in roots:
                with contextlib.suppress(OSError):
                    discard_job(root)
        return result

    def run_program(
        self,
        source: str,
        world_size: int,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        **options: Any,
    ) -> JobResult:
        """Run a program, as ``train.py``, in place of a scenario; the options are those of
        ``run_job``.
        """
        program = folder / "train.py"
        program.write_text(source)
        scenario = replace(find("healthy-plain"), name="train")
        return self.run_job(
            scenario, world_size, folder, arguments=[str(program), *arguments], **options
        )


def kill(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to those that still run."""
    for pid in pids:
        if not has_ended(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def exit_status(pid: int) -> int:
    """The wait status of a zombie, 0 when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text[text.rfind(")") + 2 :].split()[49])
    except (OSError, IndexError, ValueError):
        return 0


def _await_end(pids: list[int], deadline: float) -> bool:
    """Wait until all have ended. As torchrun does, end the others when one has failed. False when
    time is over.
    """
    failed_at: float | None = None
    while time.monotonic() < deadline:
        ended = [pid for pid in pids if has_ended(pid)]
        if len(ended) == len(pids):
            return True
        now = time.monotonic()
        if failed_at is None and any(exit_status(pid) != 0 for pid in ended):
            failed_at = now
            time.sleep(MONITOR_S)
            kill(pids, signal.SIGTERM)
        elif failed_at is not None and now - failed_at > 3.0:
            kill(pids, signal.SIGKILL)
        time.sleep(0.02)
    return False


def _await_native_dumps(environment: Mapping[str, str]) -> None:
    """Wait until each rank of a hung job has looked at torch's own recorder once more, so that all
    dumps are of the same hang.
    """
    began = time.time()
    files = (
        list(Path(environment.get("PYTEST_NATIVE_DUMPS", "")).glob("gloo_*"))
        if "PYTEST_NATIVE_DUMPS" in environment
        else []
    )
    while any(file.stat().st_mtime < began for file in files) and time.time() < began + 10:
        time.sleep(0.02)


def _await_watchers(roots: list[Path], deadline: float) -> None:
    """Wait until the job's detached watcher has cleaned up and ended."""
    while time.monotonic() < deadline:
        if not any(root.exists() for root in roots) and not _watchers(roots):
            return
        time.sleep(0.05)
    raise AssertionError(
        f"The detached watcher of {roots[0].name} does not end: {_watchers(roots)}"
    )


def _watchers(roots: list[Path]) -> list[int]:
    """Processes ``python -m commlens.watch JOB_DIR`` of this job."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if b"commlens.watch" in arguments and any(
                os.fsencode(root) in arguments for root in roots
            ):
                found.append(int(process.name))
    return found


@contextlib.contextmanager
def harness() -> Iterator[Harness]:
    """A harness with a zygote of its own, for programs that are no tests."""
    with contextlib.closing(Zygote()) as zygote:
        yield Harness(zygote)
