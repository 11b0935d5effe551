"""Finds the jobs on this node by name, pid or folder, and removes the black boxes of forgotten
ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.dumps import save
from commlens.errors import CommandError, EvidenceError
from commlens.processes import process

FORGOTTEN_AFTER_S: Final = 24 * 3600.0


def find_jobs(wanted: str | None, box_dir: str | None) -> list[Path]:
    """Return the folders of jobs with black boxes on this node, oldest first.

    Args:
        wanted: a job's name or a prefix of it, the pid of one of its ranks, or its folder; None:
            all jobs that have a running rank.
        box_dir: the setting.

    Raises:
        EvidenceError: no job is recorded, or none of them runs.
        CommandError: ``wanted`` matches no job, or several.
    """
    jobs = [job for job in job_dirs.live_jobs(box_dir) if job_dirs.boxes(job)]
    if wanted is None:
        return _running(jobs, box_dir)
    if "/" in wanted:
        if job_dirs.boxes(Path(wanted)):
            return [Path(wanted)]
        raise CommandError(f"There are no black boxes in {wanted}.")
    found = _named(jobs, wanted)
    if len(found) == 1:
        return found
    if found:
        raise CommandError(
            f"{wanted!r} matches several jobs: {_names(found)}. Give more of the name."
        )
    words = process.command_line(int(wanted), 80) if wanted.isdecimal() else ""
    if words:
        raise EvidenceError(
            f"The process {wanted} ({words}) is not recorded: it is no rank, or it"
            " was started without commlens. Start the job with `commlens launch`, `commlens run`"
            f" or COMMLENS=1 to record it. `py-spy dump --pid {wanted}` shows its Python stack now."
        )
    if not jobs:
        raise EvidenceError(f"There is no job {wanted!r}: no job is recorded on this machine.")
    raise CommandError(
        f"{wanted!r} is neither a job nor the pid of a rank on this machine. The jobs are"
        f" {_names(jobs)}."
    )


def _running(jobs: list[Path], box_dir: str | None) -> list[Path]:
    """Return the jobs with a rank that runs; raise EvidenceError if there are none."""
    if not jobs:
        where = (
            ", ".join(str(job_dirs.user_folder(root)) for root in job_dirs.box_roots(box_dir))
            or "no memory-backed folder"
        )
        raise EvidenceError(
            f"No job is recorded on this machine by this user (looked in {where}). "
            "Start one with `commlens launch`, `commlens run` or COMMLENS=1."
        )
    running = [job for job in jobs if not is_over(job)]
    if not running:
        raise EvidenceError(
            "No recorded job runs on this machine. These have ended and left black boxes:"
            f" {_names(jobs)}."
        )
    return running


def _named(jobs: list[Path], wanted: str) -> list[Path]:
    """Return the jobs with this name or with a rank of this pid, else those with this prefix."""
    names = {job: (job.name, save.dump_name([job])) for job in jobs}
    found = [job for job in jobs if wanted in names[job]]
    if not found and wanted.isdigit():
        found = _of_pid(jobs, int(wanted))
    return found or [job for job in jobs if any(name.startswith(wanted) for name in names[job])]


def _of_pid(jobs: list[Path], pid: int) -> list[Path]:
    """Return the jobs with a rank of this pid: those where it runs, if there are any."""
    boxes = [(job, box) for job in jobs for box in job_dirs.boxes(job)]
    of_pid = [(job, box) for job, box in boxes if job_dirs.box_pid(box) == pid]
    running = [job for job, box in of_pid if job_dirs.has_ended(box) is False]
    return running or [job for job, _ in of_pid]


def _names(jobs: Sequence[Path]) -> str:
    more = f" and {len(jobs) - 10} more" if len(jobs) > 10 else ""
    return ", ".join(save.dump_name([job]) for job in jobs[-10:]) + more


def discard_forgotten(mine: Sequence[Path], *, after_s: float = FORGOTTEN_AFTER_S) -> None:
    """Free the shared memory of jobs that ended long ago along with their launcher and watcher
    (SIGKILL, a lost container).

    Args:
        mine: the folders of a live job, next to which the others are.
        after_s: how long ago the last heartbeat must be.
    """
    for folder in mine:
        with contextlib.suppress(OSError):
            for job in sorted(folder.parent.iterdir()):
                if job not in mine and job_dirs.boxes(job) and is_over(job, after_s):
                    save.discard_job(job)


def is_over(job: Path, after_s: float = 0.0) -> bool:
    """Return whether all ranks of a job on this node ended that long ago."""
    return all(
        job_dirs.is_leftover(box, before_s=time.time() - after_s) for box in job_dirs.boxes(job)
    )
