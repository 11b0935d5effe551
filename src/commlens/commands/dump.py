"""``commlens dump``."""

from __future__ import annotations

import argparse
import os

from commlens.commands.naming_jobs import add_recorded_job, find_recorded_jobs


class DumpCommand:
    """Save a dump of a running, stuck or dead job on this node.

    It reads the black boxes from outside, so it needs no help from the job and does not disturb it.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_recorded_job(parser)
        parser.add_argument(
            "-o",
            "--output",
            metavar="DIR",
            help="save below this folder (default: the setting dump_dir, commlens-dumps)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.config import load_settings
        from commlens.text import joined
        from commlens.watch.asked_worlds import look_everywhere
        from commlens.watch.snapshot import dump, snapshot

        settings = load_settings(overrides={"dump_dir": arguments.output}).settings
        for job in find_recorded_jobs(arguments.job, settings.box_dir):
            folder = dump(
                settings.dump_dir,
                job,
                window_s=1.0,
                keep=settings.keep_dumps,
                mode=int(settings.dump_mode, 8),
            )
            print(folder)
            print(f"  commlens diagnose {folder}")
            logs, elsewhere, _ = look_everywhere(job, snapshot(job, window_s=0.0), settings.meet)
            if hosts := sorted({log.host for log in logs} - {os.uname().nodename}):
                print(
                    f"  More of its processes are on {joined(hosts)}: run `commlens dump` there,"
                    " too, and pass all folders to `commlens diagnose`."
                )
            for line in elsewhere.lines:
                print(f"  {line}")
        return 0
