"""Run a small program as the ranks of a real gloo job, each a process of its own, with a hard timeout."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

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
    def destroyed_later(*group):
        time.sleep(0.5)
        destroy_process_group(*group)
    dist.destroy_process_group = destroyed_later
"""


@dataclass
class Ended:
    """One rank's end."""

    returncode: int
    output: str


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(program: str, box_dir: Path, *, world_size: int = 2, timeout: float = 60, expect: int | None = 0, **env: str) -> list[Ended]:
    """Run ``program`` (after PRELUDE) as ``world_size`` ranks and wait for all.

    Programs destroy their process group at the end: gloo's threads may otherwise abort the interpreter while it shuts down,
    with or without commlens ("terminate called without an active exception").

    Args:
        expect: the exit status that every rank must have; None accepts any.
    """
    script = box_dir / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    shared.update(BOX_DIR=str(box_dir), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", **env)
    shared.pop("COMMLENS", None)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    ended = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            ended.append(Ended(process.returncode, output))
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        outputs = [process.communicate()[0] for process in processes]
        raise AssertionError("the job did not end:\n" + "\n".join(f"--- rank {r}\n{o}" for r, o in enumerate(outputs))) from None
    report = "\n".join(f"--- rank {rank}: exit {end.returncode}\n{end.output}" for rank, end in enumerate(ended))
    assert expect is None or all(end.returncode == expect for end in ended), report
    return ended
