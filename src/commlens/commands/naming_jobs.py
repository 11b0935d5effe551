"""The arguments that name a job, for several commands."""

from __future__ import annotations

import argparse


def add_recorded_job(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that names a recorded job."""
    parser.add_argument(
        "job", nargs="?", metavar="JOB|PID", help="a job's name or a prefix of it, or a rank's pid (default: all jobs that run)"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that say which job."""
    parser.add_argument(
        "job", nargs="?", metavar="PID|SCRIPT",
        help="the pid of a rank or of its launcher, or a part of the ranks' command line (default: the only job that runs here)",
    )  # fmt: skip
    parser.add_argument("--job", dest="job_name", metavar="NAME", help="the job's name: torchrun's --rdzv-id, Slurm's job id or name")
