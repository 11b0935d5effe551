"""``commlens status``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.commands.naming_jobs import add_recorded_job, find_recorded_jobs
from commlens.commands.table import print_table
from commlens.config import Settings, load_settings
from commlens.errors import CommandError
from commlens.reports.json_report import print_json
from commlens.text import naming_worlds, sentence, used_columns

if TYPE_CHECKING:
    from commlens.diagnosis.views.status import JobStatus

_JOBS_AT_ONCE = 16


class StatusCommand:
    """Show what every rank of a job is doing right now: one line if nothing is wrong, otherwise a
    table.

    It reads the black boxes from outside, so it also shows ranks that are stuck, stopped or dead.
    Ranks that do the same share a row.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_recorded_job(parser)
        parser.add_argument(
            "--all",
            action="store_true",
            help="show the table even if nothing is wrong, with a row for each rank",
        )
        parser.add_argument(
            "--step",
            action="store_true",
            help="show where a step's communication time goes instead",
        )
        parser.add_argument(
            "--health",
            action="store_true",
            help="also show the hardware of this node: networks, GPUs, memory, the kernel's log",
        )
        parser.add_argument(
            "--json", action="store_true", help="print the verdict and the rows of each job as JSON"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from concurrent.futures import ThreadPoolExecutor

        if arguments.health and (arguments.json or arguments.step):
            raise CommandError("--health prints a table of its own: leave --json and --step out.")
        settings = load_settings().settings
        jobs = find_recorded_jobs(arguments.job, settings.box_dir)
        if arguments.step:
            return _show_steps(jobs, settings, as_json=arguments.json)
        with ThreadPoolExecutor(_JOBS_AT_ONCE) as pool:  # each is observed for a moment
            statuses = pool.map(lambda job: _status(job, settings.meet), jobs)
            # Jobs that share process groups have one status, of the processes of all: keep it once.
            found = list({each.processes: each for each in statuses}.values())
        if arguments.json:
            print_json(
                [
                    {
                        "job": each.heading,
                        "verdict": each.verdict,
                        "steps": each.steps,
                        "ranks": each.rows,
                        "other_nodes": each.other_nodes,
                    }
                    for each in found
                ]
            )
            return 0
        for position, each in enumerate(found):
            print("\n" * bool(position), end="")
            with naming_worlds(each.verdict.worlds):
                _print(each, everything=arguments.all)
        if arguments.health:
            from commlens.commands.health_table import print_health
            from commlens.watch.node_health import root_of, topology_of

            print()
            print_health(root_of(settings), topology_of(settings))
        return 0


def _show_steps(jobs: Sequence[Path], settings: Settings, *, as_json: bool) -> int:
    from commlens.diagnosis.views.status import heading
    from commlens.dumps.save import dump_name
    from commlens.reports.step_table import step_table
    from commlens.speed.step_times import step_times
    from commlens.watch.node_health import HealthOfNode
    from commlens.watch.snapshot import snapshot

    shown = []
    for position, job in enumerate(jobs):
        with contextlib.closing(HealthOfNode(settings)) as health:
            logs = snapshot(job, window_s=0.0, health=health)
        name, times = heading(dump_name([job]), logs), step_times(logs)
        shown.append({"job": name, "step": times})
        if as_json:
            continue
        table = step_table(times)
        print("\n" * bool(position) + f"{name}: {table.answer}")
        if table.rows:
            print_table(table.rows, headings=table.headings, indent=2)
        for note in [*(rate.text for rate in table.rates), *table.notes]:
            print(f"  {note}")
    if as_json:
        print_json(shown)
    return 0


def _status(job: Path, meeting_place: str) -> JobStatus:
    from commlens.diagnosis.views.status import status_of
    from commlens.dumps.save import dump_name
    from commlens.watch.asked_worlds import look_everywhere
    from commlens.watch.snapshot import snapshot

    logs, elsewhere, _ = look_everywhere(job, snapshot(job, window_s=0.4), meeting_place)
    return status_of(
        dump_name([job]), logs, elsewhere.lines, alike=elsewhere.alike, hosts=elsewhere.hosts
    )


def _print(job: JobStatus, *, everything: bool) -> None:
    from commlens.diagnosis.views.status import HEADINGS, add_hosts, arrange, cells, fold
    from commlens.diagnosis.words.whole_job import past_torch

    print(f"{job.heading}: {sentence(job.answer)}")
    for line in job.other_nodes:
        print(f"  {line}")
    for bypass in job.verdict.bypasses:
        print(f"  {past_torch(bypass)}")
    if not job.needs_attention and not everything:
        return
    rows = arrange(job.rows if everything else fold(job.rows), "rank")
    headings, lines = used_columns(HEADINGS, [cells(row) for row in rows])
    if len(rows) == len(job.rows):  # none is folded: each row is one process
        headings.insert(1, "pid")
        lines = [[line[0], str(row.pid), *line[1:]] for line, row in zip(lines, rows, strict=True)]
    headings, lines = add_hosts(job, rows, headings, lines)
    print_table(lines, headings=headings, indent=2)
