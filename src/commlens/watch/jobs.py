"""Which jobs have black boxes on this node, and which of them somebody means."""

from __future__ import annotations

from pathlib import Path

from commlens.errors import CommandError, EvidenceError
from commlens.formats import places


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
    jobs = list({job.resolve(): job for job in reversed(places.live_jobs(box_dir)) if places.boxes(job)}.values())[::-1]
    if wanted is None:
        if not jobs:
            where = ", ".join(str(places.user_folder(root)) for root in places.box_roots(box_dir)) or "no memory-backed folder"
            raise EvidenceError(
                f"No job is recorded on this machine by this user (looked in {where}). "
                "Start one with `commlens launch`, `commlens run` or COMMLENS=1."
            )
        return jobs
    if "/" in wanted:
        if places.boxes(Path(wanted)):
            return [Path(wanted)]
        raise CommandError(f"There are no black boxes in {wanted}.")
    exact = [job for job in jobs if job.name == wanted]
    found = exact or [job for job in jobs if wanted.isdigit() and int(wanted) in map(places.box_pid, places.boxes(job))]
    found = found or [job for job in jobs if job.name.startswith(wanted)]
    if len(found) == 1:
        return found
    names = ", ".join(job.name for job in (found or jobs)[:10])
    if found:
        raise CommandError(f"{wanted!r} fits several jobs: {names}. Give more of the name.")
    if not jobs:
        raise EvidenceError(f"There is no job {wanted!r} on this machine, nor any other that is recorded.")
    raise CommandError(f"There is no job and no rank's pid {wanted!r} here. The jobs are {names}.")
