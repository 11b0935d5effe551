"""``commlens dump``."""

from __future__ import annotations

import argparse


class DumpCommand:
    """Write a dump of a job on this node: running, stuck or dead.

    The black boxes are read from outside, so the job need not help and does not notice.
    """

    name = "dump"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Which job, and where to."""
        parser.add_argument("job", nargs="?", metavar="JOB|PID", help="the job's name or its beginning, or the pid of a rank; default: all")
        parser.add_argument("-o", "--output", metavar="DIR", help="folder for dumps (default: the setting dump_dir, commlens-dumps)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the dumps, print the folders."""
        from commlens.config import load_settings
        from commlens.watch.jobs import find_jobs
        from commlens.watch.snapshot import dump

        settings = load_settings(overrides={"dump_dir": arguments.output}).settings
        for job in find_jobs(arguments.job, settings.box_dir):
            folder = dump(settings.dump_dir, job_dir=job, window_s=1.0, keep=settings.keep_dumps)
            print(folder)
            print(f"  commlens diagnose {folder}")
        return 0
