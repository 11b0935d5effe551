"""Job folders with boxes of processes that run, and the rights on them."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from boxes import UNIX, busy_box

from commlens.dumps.read import JobLogs
from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import End, Observation, ThreadStack


def live_job(folder: Path, ranks: int = 4, *, job: str = "job-1", **options: object) -> Path:
    job_dir = folder / "commlens-0" / job
    for rank in range(ranks):
        busy_box(rank, ranks, job=job, pid=100 + rank, **options).write(job_dir)  # type: ignore[arg-type]
    (job_dir / ".lock").touch()
    return job_dir


def ranks_of(evidence: JobLogs) -> list[int]:
    return [log.rank for log in evidence.logs]


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without root's right to open everything, where the tests run as root."""
    codecs.lookup("ascii")  # Python may lie where only root may read
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that others than this user may open. They may not open pytest's: it takes that right
    away whenever another run starts.
    """
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


SEEN = Observation(
    end=End.KILLED,
    signal="SIGKILL",
    seen_ns=UNIX + 9,
    window_s=1.0,
    cpu_s=0.5,
    proc_state="S",
    stacks=[
        ThreadStack(
            4121,
            "MainThread",
            (
                Frame("/me/a.py", 57, "load", FrameKind.USER),
                Frame("x.so", 0, "g", FrameKind.NATIVE),
            ),
            UNIX,
            True,
        )
    ],
)


def run_code(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
