"""``commlens status``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from commlens.model.collective import Collective, State
from commlens.model.ranklog import End, Observation, RankLog
from commlens.text import count, format_ranks


class StatusCommand:
    """Show what every rank on this node is doing right now.

    The black boxes are read from outside, so it works on ranks that are stuck, stopped or dead.
    """

    name = "status"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Which job."""
        parser.add_argument("job", nargs="?", metavar="JOB|PID", help="the job's name or its beginning, or the pid of a rank; default: all")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print one line for each rank."""
        from commlens.config import load_settings
        from commlens.watch.jobs import find_jobs
        from commlens.watch.snapshot import snapshot

        blocks = []
        for job in find_jobs(arguments.job, load_settings().settings.box_dir):
            logs = snapshot(job, window_s=0.4)
            blocks.append("\n".join(job_lines(job.name, logs)))
        print("\n\n".join(blocks))
        return 0


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible I/O",
    "T": "stopped",
    "t": "stopped by a debugger",
    "I": "idle",
}
HEADINGS = ("rank", "pid", "process", "step", "collective", "for", "at")


def job_lines(name: str, logs: Sequence[RankLog]) -> list[str]:
    """The job's head and one line for each rank."""
    world = max((log.world_size for log in logs), default=0)
    host = next((log.host for log in logs if log.host), "")
    script = next((log.script for log in logs if log.script), "")
    seen = f"{len(logs)} of {world} ranks" if world > len(logs) else count(len(logs), "rank")
    head = f"{name}: {seen} on {host}" + (f", {script}" if script else "")
    return [head, *_table([HEADINGS, *(rank_cells(log) for log in logs)])]


def rank_cells(log: RankLog) -> tuple[str, ...]:
    """One rank's line: what it is in or did last, since when, and where its main thread is."""
    current = current_collective(log)
    step = str(log.steps) if log.steps else ""
    since = ""
    if current is None:
        what = "none yet" if log.initialised else "in init_process_group"
    else:
        group = current.channel.group
        what = f"{current.op} #{current.sequence_number} of {group.label} [{format_ranks(group.ranks)}]"
        if current.is_point_to_point and current.peer is not None:
            what = f"{current.op} {'to' if current.op == 'send' else 'from'} {current.peer} #{current.sequence_number}"
        if current.in_flight:
            what = f"in {what}"
            since = seconds(log.captured_ns - current.announced_ns)
        else:
            ended = current.done_ns or current.wait_ended_ns or current.returned_ns or current.announced_ns
            what = f"{'after' if current.state is State.COMPLETED else current.state.value} {what}"
            since = seconds(log.captured_ns - ended)
    if log.expecting:
        what = f"{what} (expects to be slow: {log.expecting})"
    return (str(log.rank), str(log.pid), process_words(log), step, what, since, _where(log, current))


def current_collective(log: RankLog) -> Collective | None:
    """The oldest that is in flight, else the last one."""
    return next((each for each in log.collectives if each.in_flight), log.collectives[-1] if log.collectives else None)


def process_words(log: RankLog) -> str:
    """The state of its process, in words."""
    seen: Observation = log.observation
    if seen.end is End.KILLED:
        return f"killed by {seen.signal}"
    if seen.end is End.FAILED:
        return f"exited with {seen.exit_code}" if seen.exit_code is not None else "died of an exception"
    if seen.end is End.CLEAN:
        return "finished"
    if seen.end is End.GONE:
        return "gone"
    if seen.end is End.UNKNOWN:
        return "not seen from here"
    if seen.stopped_fraction is not None and seen.stopped_fraction >= 0.5:
        return "stopped"
    if seen.holds_gil:
        return "holds the GIL"
    if seen.cpu_s and seen.window_s and seen.cpu_s / seen.window_s > 0.5:
        return "computing"
    return _STATES.get(seen.proc_state or "", "running")


def _where(log: RankLog, current: Collective | None) -> str:
    stack = log.main_stack
    frame = stack.source if stack is not None and log.observation.end in (End.RUNNING, End.UNKNOWN) else None
    if frame is None and log.exception:
        return log.exception if len(log.exception) <= 80 else log.exception[:79] + "…"
    # A stack is taken once a second while nothing is issued: younger records are newer than it.
    if stack is not None and current is not None and current.announced_ns > stack.taken_ns:
        frame = current.source or frame
    if frame is None and current is not None:
        frame = current.source
    return f"{frame.where} {frame.function}" if frame is not None else ""


def seconds(ns: int) -> str:
    """A duration for people: ``"0.3 s"``, ``"31 s"``, ``"12 min"``, ``"3.1 h"``."""
    value = max(0, ns) / 1e9
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
