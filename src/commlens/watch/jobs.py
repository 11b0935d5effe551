"""Finds the jobs on this node by name, pid or folder, and removes the black boxes of forgotten ones."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import OpenBox
from commlens.dumps import save
from commlens.errors import CommandError, EvidenceError, FormatError
from commlens.watch import process

FORGOTTEN_AFTER_S: Final = 24 * 3600.0


def find_jobs(wanted: str | None, box_dir: str | None) -> list[Path]:
    """Return the folders of jobs with black boxes on this node, oldest first.

    Args:
        wanted: a job's name or a prefix of it, the pid of one of its ranks, or its folder; None: all jobs.
        box_dir: the setting.

    Raises:
        EvidenceError: no job is recorded.
        CommandError: ``wanted`` matches no job, or several.
    """
    # One memory-backed folder may be reached by two names (/run/shm is often a link to /dev/shm).
    jobs = list({job.resolve(): job for job in reversed(job_dirs.live_jobs(box_dir)) if job_dirs.boxes(job)}.values())[::-1]
    if wanted is None:
        if not jobs:
            where = ", ".join(str(job_dirs.user_folder(root)) for root in job_dirs.box_roots(box_dir)) or "no memory-backed folder"
            raise EvidenceError(
                f"No job is recorded on this machine by this user (looked in {where}). "
                "Start one with `commlens launch`, `commlens run` or COMMLENS=1."
            )
        return jobs
    if "/" in wanted:
        if job_dirs.boxes(Path(wanted)):
            return [Path(wanted)]
        raise CommandError(f"There are no black boxes in {wanted}.")
    exact = [job for job in jobs if job.name == wanted]
    found = exact or [job for job in jobs if wanted.isdigit() and int(wanted) in map(job_dirs.box_pid, job_dirs.boxes(job))]
    found = found or [job for job in jobs if job.name.startswith(wanted)]
    if len(found) == 1:
        return found
    names = ", ".join(job.name for job in (found or jobs)[:10])
    if found:
        raise CommandError(f"{wanted!r} matches several jobs: {names}. Give more of the name.")
    if not jobs:
        raise EvidenceError(f"There is no job {wanted!r}: no job is recorded on this machine.")
    raise CommandError(f"{wanted!r} is neither a job nor the pid of a rank on this machine. The jobs are {names}.")


def discard_forgotten(mine: Sequence[Path], *, after_s: float = FORGOTTEN_AFTER_S) -> None:
    """Free the shared memory of jobs that ended long ago along with their launcher and watcher (SIGKILL, a lost container).

    Args:
        mine: the folders of a live job, next to which the others are.
        after_s: how long ago the last heartbeat must be.
    """
    for folder in mine:
        with contextlib.suppress(OSError):
            for job in sorted(folder.parent.iterdir()):
                if job not in mine and job_dirs.boxes(job) and all(_is_forgotten(box, after_s) for box in job_dirs.boxes(job)):
                    save.discard_job(job)


def _is_forgotten(path: Path, after_s: float) -> bool:
    try:
        with OpenBox(path) as box:
            status = box.status()
    except FormatError:
        return False
    is_old = time.time() - status.heartbeat_ns / 1e9 > after_s
    is_local = status.host == os.uname().nodename and status.pid_namespace == process.pid_namespace()
    return is_old and is_local and not process.is_running(status.pid, status.start_ticks)
