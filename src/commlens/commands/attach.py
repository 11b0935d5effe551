"""``commlens attach``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from commlens.commands.naming_jobs import add_job
from commlens.commands.verdict_output import add_json, show_verdict
from commlens.config import load_settings
from commlens.errors import CommandError, EvidenceError
from commlens.text import INLINE_CODE, naming_worlds

if TYPE_CHECKING:
    from commlens.model.health import NodeHealth
    from commlens.model.ranklog import RankLog
    from commlens.model.verdict import Verdict
    from commlens.model.worlds import Worlds
    from commlens.outside.find_ranks import FoundWorld
    from commlens.outside.sample import HostSamples


class AttachCommand:
    """Look at a job that was started without commlens: say whether it is stuck, on which rank and
    line.

    It finds the ranks by their environment and process tree, reads their stacks from outside with
    py-spy at three moments, looks at the node's hardware, and changes nothing in the job. Exit
    status: 0 the job moves or nothing is wrong, 1 a fault was found, 2 wrong usage, 3 no rank could
    be looked at.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_job(parser)
        parser.add_argument(
            "--window",
            type=float,
            default=2.5,
            metavar="S",
            help="watch the ranks for S seconds (default: 2.5)",
        )
        parser.add_argument(
            "--native",
            action="store_true",
            help="also read C++ frames; py-spy pauses each rank for some milliseconds",
        )
        parser.add_argument(
            "--stacks",
            action="store_true",
            help="also print the merged stacks of all ranks, as commlens stacks does",
        )
        parser.add_argument(
            "--hosts", metavar="A,B,...", help="also look on these machines, through ssh"
        )
        parser.add_argument(
            "--hostfile", metavar="FILE", help="the same, from a file with one host per line"
        )
        parser.add_argument(
            "--remote-command",
            metavar="COMMAND",
            help="how to run commlens on the other machines (default: this Python, -m commlens)",
        )
        add_json(parser)
        # for --hosts, which asks each machine for them
        parser.add_argument("--samples", action="store_true", help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        if not 0.2 <= arguments.window <= 3600:
            raise CommandError(f"--window takes 0.2 to 3600 seconds, not {arguments.window:g}.")
        if arguments.samples:
            import msgspec

            sys.stdout.buffer.write(
                msgspec.json.encode(_look_here(_find_here(arguments), arguments))
            )
            return 0
        from commlens.commands.diagnose import exit_status
        from commlens.commands.progress import working
        from commlens.outside.verdict import judge_with_dumps

        # black boxes hold no C++ frames, and nothing of ranks on hosts that only ssh reaches
        verdict = (
            None
            if arguments.hosts or arguments.hostfile or arguments.native
            else _of_black_boxes(_find_here(arguments))
        )
        hosts: list[HostSamples] = []
        if verdict is None:
            with working(f"Looking at the ranks for {arguments.window:g} s"):
                hosts = _look_everywhere(arguments)
                verdict = judge_with_dumps(hosts)
        show_verdict(verdict, as_json=arguments.json)
        if hosts and not arguments.json and (arguments.stacks or arguments.native):
            _print_stacks(hosts, verdict.worlds, whole=arguments.native)
        return exit_status(verdict)


def _look_everywhere(arguments: argparse.Namespace) -> list[HostSamples]:
    """Look here and on the named hosts, at the same time.

    Raises:
        EvidenceError: no rank was found anywhere.
    """
    from commlens.outside.hosts import look_on_hosts, named_hosts

    names = named_hosts(arguments.hosts, arguments.hostfile)
    if not names:
        return _look_here(_find_here(arguments), arguments)
    from concurrent.futures import ThreadPoolExecutor

    refused = ""
    try:
        worlds: Sequence[FoundWorld] = _find_here(arguments)
    except EvidenceError as error:  # a login node has no ranks
        worlds, refused = [], str(error)
    asked = ["--job", arguments.job_name] if arguments.job_name else []
    if arguments.job is not None:
        asked += [_name_elsewhere(worlds, arguments.job)]
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(
            look_on_hosts, names, asked, window_s=arguments.window, command=arguments.remote_command
        )
        hosts = _look_here(worlds, arguments) if worlds else []
        hosts += [host for host in elsewhere.result() if _pids(host).isdisjoint(_pids(*hosts))]
    if not any(host.samples for host in hosts):
        notes = " ".join(note for host in hosts for note in host.notes)
        raise EvidenceError(f"No rank was found on {', '.join(names)}. {notes or refused}")
    return hosts


def _pids(*hosts: HostSamples) -> set[tuple[str, int]]:
    """Return the processes of ranks, by which a machine that was named is known to be this one."""
    return {(host.host, sample.log.pid) for host in hosts for sample in host.samples}


def _of_black_boxes(worlds: Sequence[FoundWorld]) -> Verdict | None:
    """Return the verdict of a job that is recorded after all; None if not all ranks of its first
    world here are recorded.
    """
    from commlens.diagnosis.examine import diagnose_logs
    from commlens.watch.jobs import find_jobs
    from commlens.watch.other_worlds import with_other_worlds
    from commlens.watch.snapshot import snapshot

    try:
        folders = find_jobs(str(worlds[0].ranks[0].pid), load_settings().settings.box_dir)
    except CommandError:
        return None
    logs = with_other_worlds(snapshot(folders[0]), folders[:1])
    if not worlds[0].pids <= {log.pid for log in logs if not log.unrecorded}:
        return None
    with _watching_hardware(worlds) as finish:
        if finish is not None and logs:
            logs[0].health = finish(logs)
    verdict = diagnose_logs(logs)
    verdict.looked_at = (
        f"{worlds[0].label}: {verdict.looked_at}; this job is recorded, so the verdict is from its"
        " black boxes"
    )
    return verdict


def _name_elsewhere(here: Sequence[FoundWorld], wanted: str) -> str:
    """Return by what to find the job on another machine, where its pids are others.

    Args:
        here: the job's worlds on this machine; empty on a login node.
        wanted: by what the user named the job.
    """
    from commlens.processes.process import script_of

    if not wanted.isdecimal():
        return wanted
    if not here:
        raise CommandError(
            f"The process {wanted} is no rank of this machine: name the job by its script or --job."
        )
    script = script_of(here[0].ranks[0].command)
    if script == INLINE_CODE:
        raise CommandError(
            f"The process {wanted} runs code that has no name on other machines: name the job by"
            " --job."
        )
    return script.partition(" ")[0]


def _find_here(arguments: argparse.Namespace) -> list[FoundWorld]:
    from commlens.outside.find_ranks import find_worlds

    return find_worlds(arguments.job, arguments.job_name)


def _look_here(worlds: Sequence[FoundWorld], arguments: argparse.Namespace) -> list[HostSamples]:
    from commlens.outside.look import look_at

    with _watching_hardware(worlds) as finish:
        found = look_at(worlds, window_s=arguments.window, native=arguments.native)
        if finish is not None:
            found[0].health = finish([sample.log for each in found for sample in each.samples])
    return found


def _watching_hardware(
    worlds: Sequence[FoundWorld],
) -> AbstractContextManager[Callable[[Sequence[RankLog]], NodeHealth] | None]:
    """Watch this node's hardware meanwhile. Yields a function that returns the findings, for the
    logs of this node's ranks; None if the settings switch that off.
    """
    from commlens.outside.hardware import look_at_hardware
    from commlens.watch.node_health import root_of, topology_of

    settings = load_settings().settings
    if settings.health == "off":
        return contextlib.nullcontext()
    return look_at_hardware(worlds, root_of(settings), topology_of(settings))


def _print_stacks(hosts: list[HostSamples], worlds: Worlds, *, whole: bool) -> None:
    from commlens.outside.seen import SeenJob
    from commlens.reports.stacks_terminal import merge_stacks, print_classes

    print()
    with naming_worlds(worlds):
        print_classes(merge_stacks([each.log for each in SeenJob(hosts).samples]), whole=whole)
