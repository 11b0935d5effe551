"""Which jobs have black boxes on this node, and which of them somebody means."""

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
    """The folders of jobs that have black boxes here, oldest first.

    Args:
        wanted: a job's name or the beginning of it, the pid of one of its ranks, or its folder; None: all.
        box_dir: the setting.

    Raises:
        EvidenceError: there is none.
        CommandError: ``wanted`` names none, or the beginning fits several.
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
        raise CommandError(f"{wanted!r} fits several jobs: {names}. Give more of the name.")
    if not jobs:
        raise EvidenceError(f"There is no job {wanted!r} on this machine, nor any other that is recorded.")
    raise CommandError(f"There is no job and no rank's pid {wanted!r} here. The jobs are {names}.")


def discard_forgotten(mine: Sequence[Path], *, after_s: float = FORGOTTEN_AFTER_S) -> None:
    """Free the shared memory of jobs that ended long ago, launcher and watcher with them (SIGKILL, a lost node's container).

    Args:
        mine: folders of a live job; its neighbours are looked at, never itself.
        after_s: how long a job's last sign of life must be past.
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
    here = status.host == os.uname().nodename and status.pid_namespace == process.pid_namespace()
    past = time.time() - status.heartbeat_ns / 1e9 > after_s
    return here and past and not process.runs(status.pid, status.start_ticks)
