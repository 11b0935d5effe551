"""``commlens stacks``."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlens.commands.naming_jobs import add_job
from commlens.commands.progress import working
from commlens.errors import CommandError, MissingDependency
from commlens.reports.json_report import print_json
from commlens.text import count, joined, naming_worlds

if TYPE_CHECKING:
    from commlens.model.ranklog import RankLog
    from commlens.reports.stacks_terminal import StackRow
    from commlens.watch.other_nodes import OtherNodes


class StacksCommand:
    """Show the stacks of all ranks of a job, merged into a few classes, the odd ones first.

    Recorded ranks record their stacks themselves. py-spy reads the stacks of ranks that cannot,
    because they are stopped or hold the GIL, and of jobs that were started without commlens.
    Nothing in the job is changed.
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
        from commlens.model.worlds import ONE_WORLD
        from commlens.reports.stacks_terminal import merge_stacks, print_classes

        with working("Reading the ranks' stacks"):
            logs, elsewhere = read_stacks(
                arguments.job, arguments.job_name, native=arguments.native
            )
        worlds = logs[0].worlds if logs else ONE_WORLD
        with naming_worlds(worlds):
            classes = merge_stacks(logs)
        if elsewhere is not None:
            classes = with_alike_ranks(classes, elsewhere)
        if arguments.json:
            print_json(classes)
            return 0
        script = (
            joined(sorted(world.name for world in worlds.worlds))
            if worlds.are_several
            else next((log.script for log in logs if log.script), "the job")
        )
        stand = "stands" if len(logs) == 1 else "stand"
        ranks = sum(len(each.ranks) for each in classes)
        print(f"{count(ranks, 'rank')} of {script} {stand} at {count(len(classes), 'place')}:\n")
        with naming_worlds(worlds):
            print_classes(
                classes,
                most=len(classes) if arguments.all else 20,
                whole=arguments.whole or arguments.native,
            )
        for line in elsewhere.lines if elsewhere is not None else ():
            print(f"\n{line}")
        return 0


def with_alike_ranks(classes: Sequence[StackRow], elsewhere: OtherNodes) -> list[StackRow]:
    """Add to the classes the ranks without a log that are known to stand at the same place as a
    rank with one. Return the classes, those with the fewest ranks first.
    """
    import msgspec

    # by the first rank with a log in each state
    alike = {min(each.examined): each.others for each in elsewhere.alike.classes if each.examined}
    found = [
        msgspec.structs.replace(
            each,
            ranks=sorted(
                {*each.ranks, *(r for first in alike.keys() & each.ranks for r in alike[first])}
            ),
        )
        for each in classes
    ]
    return sorted(found, key=lambda each: (len(each.ranks), each.ranks))


def read_stacks(
    wanted: str | None, job_name: str | None, *, native: bool = False
) -> tuple[Sequence[RankLog], OtherNodes | None]:
    """Return the ranks of a job with their stacks, and the other nodes' answers if it is recorded.

    If the job is recorded, the stacks come from its black boxes, and the ranks of other nodes, or
    of other worlds that share a group with it, are included. Else py-spy reads the stacks.

    Args:
        wanted: a job's name or a prefix of it, a pid, or a part of the ranks' command line; None:
            the only job that runs here.
        job_name: torchrun's ``--rdzv-id``, Slurm's job id or name; py-spy reads the stacks.
        native: whether to read C++ frames, too; py-spy reads the stacks.

    Raises:
        CommandError: several jobs match.
        EvidenceError: no job matches.
    """
    from commlens.outside.find_ranks import find_worlds
    from commlens.outside.look import look_at
    from commlens.outside.seen import SeenJob

    recorded = _recorded(wanted) if not native and job_name is None else None
    if recorded is not None:
        return recorded
    worlds = look_at(find_worlds(wanted, job_name), window_s=0.5, native=native)
    return [sample.log for sample in SeenJob(worlds).samples], None


def _recorded(wanted: str | None) -> tuple[Sequence[RankLog], OtherNodes] | None:
    """Return the ranks of a recorded job; None if none has this name or pid, or if several run that
    share no group.
    """
    from commlens.config import load_settings
    from commlens.watch.asked_worlds import look_everywhere
    from commlens.watch.jobs import find_jobs
    from commlens.watch.snapshot import snapshot

    settings = load_settings().settings
    try:
        folders = find_jobs(wanted, settings.box_dir)
    except CommandError:
        return None
    here = snapshot(folders[0], window_s=0.4)
    logs, elsewhere, others = look_everywhere(folders[0], here, settings.meet)
    if not others.keys() >= set(folders[1:]):
        return None
    far = [*logs]
    for world in (here, *others.values()):
        processes = {(log.host, log.pid) for log in world}
        _read_stacks_anew([log for log in far if (log.host, log.pid) in processes])
        far = [log for log in far if (log.host, log.pid) not in processes]
    for log in filter(_is_stale, far):
        log.stacks = []
        log.observation.stacks_note = "it runs; its stack can be read on its node"
    return sorted(logs, key=lambda log: log.rank), elsewhere


def _is_stale(log: RankLog) -> bool:
    """Return whether a rank has moved since its last stack was recorded."""
    return log.main_stack is not None and log.current_stack is None


def _read_stacks_anew(logs: Sequence[RankLog]) -> None:
    """Read the stacks of those ranks of this node that have moved since they recorded one, with
    py-spy.
    """
    from commlens.outside.find_ranks import find_worlds
    from commlens.outside.look import look_at

    stale = {log.pid: log for log in logs if _is_stale(log)}
    for log in stale.values():
        log.stacks = []
    if stale:
        with contextlib.suppress(CommandError, MissingDependency):
            for sample in look_at(find_worlds(str(min(stale)))[:1], window_s=0.5)[0].samples:
                if sample.log.pid in stale:
                    stale[sample.log.pid].observation = sample.log.observation
