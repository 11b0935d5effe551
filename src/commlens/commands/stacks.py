"""``commlens stacks``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlens.commands.naming_jobs import add_job
from commlens.errors import CommandError, EvidenceError, MissingDependency

if TYPE_CHECKING:
    from commlens.model.ranklog import RankLog


class StacksCommand:
    """Show the stacks of all ranks of a job, merged into a few classes, the odd ones first.

    Recorded ranks record their stacks themselves; those that cannot, because they are stopped or
    hold the GIL, and jobs that were started without commlens are read with py-spy. Nothing in the
    job is changed.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_job(parser)
        parser.add_argument(
            "--all",
            action="store_true",
            help="show all classes; otherwise the 20 with the fewest ranks",
        )
        parser.add_argument(
            "--whole",
            action="store_true",
            help="show all frames, also torch's and Python's around your code",
        )
        parser.add_argument(
            "--native",
            action="store_true",
            help="also read C++ frames; py-spy pauses each rank for some milliseconds",
        )
        parser.add_argument("--json", action="store_true", help="print the classes as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.commands.progress import working
        from commlens.diagnosis.views.process_words import notable_state
        from commlens.model.stack_classes import merge_stacks
        from commlens.reports.stacks_terminal import print_classes
        from commlens.text import count

        with working("Reading the ranks' stacks"):
            logs = find_logs(arguments.job, arguments.job_name, native=arguments.native)
        classes = merge_stacks(logs, [notable_state(log) for log in logs])
        if arguments.json:
            import msgspec

            print(msgspec.json.format(msgspec.json.encode(classes), indent=2).decode())
            return 0
        script = next((log.script for log in logs if log.script), "the job")
        stand = "stands" if len(logs) == 1 else "stand"
        print(
            f"{count(len(logs), 'rank')} of {script} {stand} at {count(len(classes), 'place')}:\n"
        )
        print_classes(
            classes,
            most=len(classes) if arguments.all else 20,
            whole=arguments.whole or arguments.native,
        )
        return 0


def find_logs(
    wanted: str | None, job_name: str | None, *, native: bool = False
) -> Sequence[RankLog]:
    """Return the ranks of a job with their stacks: from its black boxes, else with py-spy.

    Raises:
        CommandError: several jobs match.
        EvidenceError: no job matches.
    """
    from commlens.config import load_settings
    from commlens.outside.find_ranks import find_job
    from commlens.outside.look import look_at
    from commlens.watch.jobs import find_jobs
    from commlens.watch.snapshot import snapshot

    if not native and job_name is None:
        try:
            jobs = find_jobs(wanted, load_settings().settings.box_dir)
        except CommandError:
            jobs = []  # the name may be that of a job that is not recorded
        if len(jobs) == 1:
            logs = snapshot(jobs[0], window_s=0.4)
            stale = [
                log for log in logs if log.main_stack is not None and log.current_stack is None
            ]
            if not stale:
                return logs
            try:  # ranks that run do not record their stacks
                return [
                    sample.log
                    for sample in look_at(find_job(str(stale[0].pid), None), window_s=0.5).samples
                ]
            except (CommandError, EvidenceError, MissingDependency):
                for log in stale:
                    log.stacks = []
                return logs
    return [
        sample.log
        for sample in look_at(find_job(wanted, job_name), window_s=0.5, native=native).samples
    ]
