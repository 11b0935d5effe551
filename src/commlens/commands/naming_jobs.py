"""The arguments that name a job, for several commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from commlens.errors import CommandError, EvidenceError


def add_recorded_job(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that names a recorded job."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB|PID",
        help="a job's name or a prefix of it, or a rank's pid (default: all jobs that run)",
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a job, recorded or not: its process, script or name."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="PID|SCRIPT",
        help=(
            "the pid of a rank or of its launcher, or a part of the ranks' command line (default:"
            " the only job that runs here)"
        ),
    )
    parser.add_argument(
        "--job",
        dest="job_name",
        metavar="NAME",
        help="the job's name: torchrun's --rdzv-id, Slurm's job id or name",
    )


def find_recorded_jobs(wanted: str | None, box_dir: str | None) -> list[Path]:
    """Return the folders of recorded jobs, as :func:`commlens.watch.jobs.find_jobs` does.

    Raises:
        EvidenceError: no such job is recorded. If jobs run here that nothing records, the message
            names them and ``commlens attach``.
        CommandError: ``wanted`` matches no job, or several.
    """
    from commlens.watch.jobs import find_jobs

    try:
        return find_jobs(wanted, box_dir)
    except EvidenceError as error:
        advice = _unrecorded(wanted)
        if not advice:
            raise
        raise EvidenceError(advice) from error


def _unrecorded(wanted: str | None) -> str:
    """Return a sentence with the jobs on this machine that commlens does not record, and with the
    command that examines them; empty if there are none.
    """
    from commlens.outside.find_ranks import all_worlds, find_worlds, labels_of
    from commlens.text import capital, verb

    try:
        jobs = all_worlds() if wanted is None else find_worlds(wanted)
    except CommandError:
        return ""
    if not jobs:
        return ""
    if len(jobs) == 1:
        job, pids = jobs[0], [one.pid for one in jobs[0].ranks]
        return (
            f"{capital(job.label)} {verb(pids, 'runs', 'run')} here without commlens, so nothing is"
            f" recorded: `commlens attach {pids[0]}` says whether {verb(pids, 'it is', 'they are')}"
            " stuck, and where."
        )
    return (
        f"{len(jobs)} jobs run here without commlens, so nothing is recorded: {labels_of(jobs)}."
        " `commlens attach PID` says whether one is stuck."
    )
