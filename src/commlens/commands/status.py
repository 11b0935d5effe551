"""``commlens status``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from commlens.commands.table import print_table
from commlens.diagnosis.process_words import process_words
from commlens.model.collective import Collective, State
from commlens.model.ranklog import End, RankLog
from commlens.text import count, duration, group_phrase


class StatusCommand:
    """Show what every rank on this node is doing right now.

    It reads the black boxes from outside, so it also shows ranks that are stuck, stopped or dead.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "job", nargs="?", metavar="JOB|PID", help="a job's name or a prefix of it, or a rank's pid (default: all jobs that run)"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from concurrent.futures import ThreadPoolExecutor

        from commlens.config import load_settings
        from commlens.dumps.save import dump_name
        from commlens.watch.jobs import find_jobs
        from commlens.watch.snapshot import snapshot

        jobs = find_jobs(arguments.job, load_settings().settings.box_dir)
        with ThreadPoolExecutor(_JOBS_AT_ONCE) as pool:  # each is observed for a moment
            for position, (job, logs) in enumerate(zip(jobs, pool.map(lambda job: snapshot(job, window_s=0.4), jobs), strict=True)):
                print("\n" * bool(position) + heading(dump_name([job]), logs))
                print_table([rank_cells(log) for log in logs], headings=HEADINGS, indent=2)
        return 0


_JOBS_AT_ONCE = 16
HEADINGS = ("rank", "pid", "process", "step", "collective", "for", "at")
_EXCEPTION_MAX = 80


def heading(name: str, logs: Sequence[RankLog]) -> str:
    """Return the line above a job's table: ``"train-20261121: 4 ranks on n03, train.py --lr 0.1"``."""
    world = max((log.world_size for log in logs), default=0)
    host = next((log.host for log in logs if log.host), "")
    script = next((log.script for log in logs if log.script), "")
    ranks = f"{len(logs)} of {world} ranks" if world > len(logs) else count(len(logs), "rank")
    return f"{name}: {ranks} on {host}" + (f", {script}" if script else "")


def rank_cells(log: RankLog) -> tuple[str, ...]:
    """Return one rank's row: its process, its collective, for how long, and where its main thread is."""
    current = current_collective(log)
    age = ""
    if current is None:
        doing = "none yet" if log.initialised or not log.setups else "in init_process_group"
    else:
        group = current.channel.group
        doing = f"{current.op} #{current.sequence_number} of {group_phrase(group)}"
        if current.is_point_to_point and current.peer is not None:
            doing = f"{current.op} {'to' if current.op == 'send' else 'from'} {current.peer} #{current.sequence_number}"
        if current.in_flight:
            doing = f"in {doing}"
            age = duration(log.captured_ns - current.announced_ns)
        else:
            ended = current.done_ns or current.wait_ended_ns or current.returned_ns or current.announced_ns
            doing = f"{'after' if current.state is State.COMPLETED else current.state.value} {doing}"
            age = duration(log.captured_ns - ended)
    if log.expecting:
        doing = f"{doing} (expects to be slow: {log.expecting})"
    return (str(log.rank), str(log.pid), process_words(log), str(log.steps or ""), doing, age, _where(log, current))


def current_collective(log: RankLog) -> Collective | None:
    """Return the oldest collective in flight, otherwise the last one."""
    return next((each for each in log.collectives if each.in_flight), log.collectives[-1] if log.collectives else None)


def _where(log: RankLog, current: Collective | None) -> str:
    stack = log.main_stack
    frame = stack.source if stack is not None and log.observation.end in (End.RUNNING, End.UNKNOWN) else None
    if frame is None and log.exception:
        return log.exception if len(log.exception) <= _EXCEPTION_MAX else log.exception[: _EXCEPTION_MAX - 1] + "…"
    # While nothing is issued, a stack is taken once a second: a younger record is newer than the stack.
    if stack is not None and current is not None and current.announced_ns > stack.taken_ns:
        frame = current.source or frame
    if frame is None and current is not None:
        frame = current.source
    return f"{frame.where} {frame.function}" if frame is not None else ""
