"""Run a small program as the ranks of a real gloo job, each a process of its own, with a hard
timeout.

The ranks are forks of a process that has imported torch (``zygote.py``), or, where a test asks for
it, interpreters of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from ports import free_port
from zygote_client import Zygote, has_ended

PRELUDE = """
import os, sys, time, logging, signal
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
import torch, torch.distributed as dist
torch.set_num_threads(1)
if os.environ.get("RECORD", "1") == "1":
    from commlens import config
    from commlens.capture import session
    from commlens.launch import recording
    recording.start(config.Settings(
        box_dir=os.environ.get("BOX_AT", os.environ["BOX_DIR"]), job="job", watched=True,
        box_entries=int(os.environ.get("ENTRIES", "2000")), cpp_stack=os.environ.get("CPP_STACK") == "1",
        timing=os.environ.get("TIMING") == "1", engine=os.environ.get("COMMLENS_ENGINE", "python"),
    ))
if torch.__version__.startswith("2.6."):
    # It joins gloo's threads with the GIL held, for which they may still be waiting: a deadlock of its own, recorded or not.
    destroy_process_group = dist.destroy_process_group
    def destroyed_later(group=None):
        time.sleep(0.5)
        destroy_process_group(group)
    dist.destroy_process_group = destroyed_later
"""


@dataclass
class Ended:
    """One rank's end."""

    returncode: int | None  # None: it had to be killed
    output: str


class Ranks:
    """Runs programs as ranks, which the zygote forks."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def run(
        self,
        program: str,
        box_dir: Path,
        *,
        world_size: int = 2,
        timeout: float = 60,
        expect: int | None = 0,
        fresh: bool = False,
        **env: str,
    ) -> list[Ended]:
        """Run ``program`` (after PRELUDE) as ``world_size`` ranks and wait for all.

        Programs destroy their process group at the end: gloo's threads may otherwise abort the
        interpreter while it shuts down, with or without commlens ("terminate called without an
        active exception").

        Args:
            program: the source.
            box_dir: for the program, its output and the black boxes.
            world_size: number of ranks.
            timeout: seconds after which all are killed and the test fails.
            expect: the exit status that every rank must have; None accepts any.
            fresh: every rank is an interpreter of its own, which imports torch and ends as Python
                ends.
            env: more variables.
        """
        script = box_dir / "program.py"
        script.write_text(PRELUDE + textwrap.dedent(program))
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            **env,
        }
        shared.update(BOX_DIR=str(box_dir), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
        of_ranks = [
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)
        ]
        ended = (_run_fresh if fresh else self._run_forked)(
            script, of_ranks, time.monotonic() + timeout
        )
        report = "\n".join(
            f"--- rank {rank}: exit {end.returncode}\n{end.output}"
            for rank, end in enumerate(ended)
        )
        assert all(end.returncode is not None for end in ended), "the job did not end:\n" + report
        assert expect is None or all(end.returncode == expect for end in ended), report
        return ended

    def _run_forked(
        self, script: Path, of_ranks: list[dict[str, str]], deadline: float
    ) -> list[Ended]:
        engine = {name: value for name, value in os.environ.items() if name.startswith("COMMLENS_")}
        ranks = [
            {"environment": {**engine, **environment}, "arguments": [str(script)]}
            for environment in of_ranks
        ]
        # not beside the boxes: a test fills that file system
        with tempfile.TemporaryDirectory() as folder:
            pids = self._zygote.ask(do="start", folder=folder, store=False, ranks=ranks)["pids"]
            while not all(map(has_ended, pids)) and time.monotonic() < deadline:
                time.sleep(0.02)
            late = [pid for pid in pids if not has_ended(pid)]
            for pid in late:
                os.kill(pid, signal.SIGKILL)
            statuses = self._zygote.reap(pids)
            outputs = [(Path(folder) / f"rank{rank}.out").read_text() for rank in range(len(pids))]
        codes = [None if pid in late else os.waitstatus_to_exitcode(statuses[pid]) for pid in pids]
        return [Ended(code, output) for code, output in zip(codes, outputs, strict=True)]


def _run_fresh(script: Path, of_ranks: list[dict[str, str]], deadline: float) -> list[Ended]:
    inherited = {name: value for name, value in os.environ.items() if name != "COMMLENS"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**inherited, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in of_ranks
    ]
    ended = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            ended.append(Ended(process.returncode, output))
        except subprocess.TimeoutExpired:
            process.kill()
            ended.append(Ended(None, process.communicate()[0]))
    return ended
