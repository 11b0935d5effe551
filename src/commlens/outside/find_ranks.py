"""Find the ranks of jobs on this machine that nothing records: by environment, process tree and
command line.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from commlens import launchers
from commlens.blackbox import job_dirs
from commlens.errors import CommandError, EvidenceError
from commlens.processes import process, pyspy
from commlens.processes.connections import links_between
from commlens.processes.ranks import (
    RankProcess,
    ancestors_of,
    one_of_each,
    python_processes,
    rank_process,
)
from commlens.text import count, ranks_phrase

_SAME_JOB: Final = ("WORLD_SIZE", *launchers.PLACES, *launchers.STARTS)
_LAUNCHERS: Final = re.compile(
    r"(torchrun|accelerate|deepspeed|torch\.distributed\.(run|launch)|mpirun|mpiexec|srun|commlens"
    r" launch)\b"
)
_OUR_OWN: Final = re.compile(r" -m commlens\.(watch|verification)\b")
"""Helpers of a recorded rank, which have its environment."""
_JOBS_NAMED: Final = 8


class FoundWorld(NamedTuple):
    """The ranks on this machine of one world: of a job, or of one of its programs if these have
    default groups of their own.
    """

    ranks: list[RankProcess]
    expected: list[int]  # ranks that this machine should have; empty: unknown
    key: str = ""  # what its processes have in common in their environment, on every machine
    name: str = ""  # that its environment gives it

    @property
    def pids(self) -> set[int]:
        """The processes of its ranks."""
        return {one.pid for one in self.ranks}

    @property
    def label(self) -> str:
        """``"4 ranks of train.py (pid 4121)"``."""
        first = self.ranks[0]
        known = all(one.rank >= 0 for one in self.ranks)
        who = (
            ranks_phrase(one.rank for one in self.ranks)
            if known
            else count(len(self.ranks), "process", "processes")
        )
        return f"{who} of {process.script_of(first.command)} (pid {first.pid})"


def find_worlds(wanted: str | None, job_name: str | None = None) -> list[FoundWorld]:
    """Return the worlds on this machine of one job: a world that matches, and after it those whose
    processes are connected with it, directly or through another world.

    Args:
        wanted: a pid, of a rank, its launcher or one of its children, or a part of the command
            line; None: the only job here.
        job_name: torchrun's ``--rdzv-id``, Slurm's job id or name.

    Raises:
        CommandError: several jobs match.
        EvidenceError: no job matches, or its processes belong to another user.
    """
    if wanted is not None and wanted.isdecimal():
        matching, here = _of_pid(int(wanted))
        several = f"The process {wanted} started several jobs"
    else:
        name = wanted or job_name
        about = f" that match {name!r}" if name else ""
        here = all_worlds()
        matching = [world for world in here if _matches(world, wanted, job_name)]
        several = f"Several jobs{about} run on this machine"
        if not matching:
            own = f" as {_user(os.geteuid())}; the processes of other users are not visible to you"
            raise EvidenceError(
                f"No ranks of a distributed job{about} run on this machine"
                f"{own if os.geteuid() else ''}. Give the pid of a rank or of its launcher."
            )
    worlds = _connected_with(matching[0], here)
    found = {pid for world in worlds for pid in world.pids}
    if any(found.isdisjoint(world.pids) for world in matching):
        raise CommandError(f"{several}: {_choice_among(matching)}")
    return worlds


def _matches(world: FoundWorld, wanted: str | None, job_name: str | None) -> bool:
    return any(wanted is None or wanted in one.command for one in world.ranks) and any(
        job_name is None or job_name in one.names for one in world.ranks
    )


def _connected_with(first: FoundWorld, here: Sequence[FoundWorld]) -> list[FoundWorld]:
    """Return a world, and after it those of ``here`` that belong to the same job."""
    others = [world for world in here if world.pids.isdisjoint(first.pids)]
    links = links_between(first.pids.union(*(world.pids for world in others))) if others else {}
    worlds = [first]
    for world in worlds:  # also those that are found meanwhile
        near = {pid for link in links if not world.pids.isdisjoint(link) for pid in link}
        worlds += [
            other for other in others if other not in worlds and not near.isdisjoint(other.pids)
        ]
    return worlds


def _choice_among(jobs: Sequence[FoundWorld]) -> str:
    """Return the jobs, and by what to name one of them."""
    scripts = (process.script_of(job.ranks[0].command).partition(" ")[0] for job in jobs)
    alone = [
        script for script in scripts if sum(script in job.ranks[0].command for job in jobs) == 1
    ]
    by_script = f"its script, such as {alone[0]}, or by " if alone else ""
    return f"{labels_of(jobs)}. Name one by {by_script}the pid of a rank."


def labels_of(jobs: Sequence[FoundWorld]) -> str:
    """Return the first jobs by name: ``"ranks 0-1 of train.py (pid 41); 3 more"``."""
    more = [f"{len(jobs) - _JOBS_NAMED} more"] if len(jobs) > _JOBS_NAMED else []
    return "; ".join([*(job.label for job in jobs[:_JOBS_NAMED]), *more])


def all_worlds(preferred: Collection[int] = ()) -> list[FoundWorld]:
    """Return the worlds on this machine that this user may look at, oldest first.

    Args:
        preferred: pids; of several processes that are the same rank of the same world, these count.
    """
    found: dict[str, list[RankProcess]] = {}
    names: dict[str, str] = {}
    for pid, environ in python_processes():
        one = _rank_of_a_job(pid, environ)
        if one is not None:
            key = "|".join(environ.get(name, "") for name in _SAME_JOB)
            found.setdefault(key, []).append(one)
            names[key] = environ.get("COMMLENS_WORLD", "") or launchers.world_of(
                environ, one.command.encode()
            )
    for ranks in found.values():
        known = {one.rank for one in ranks if one.pid in preferred}
        ranks[:] = [one for one in ranks if one.pid in preferred or one.rank not in known]
    worlds = [
        _with_expected(one_of_each(ranks))._replace(key=key, name=names[key])
        for key, ranks in found.items()
    ]
    return sorted(worlds, key=lambda world: min(one.start_ticks for one in world.ranks))


def _rank_of_a_job(pid: int, environ: Mapping[str, str]) -> RankProcess | None:
    """Return the rank that a process is; None if it is none, or only started or helps one."""
    one = rank_process(pid, environ)
    command = process.command_line(pid) if one is not None else ""
    is_launcher = _LAUNCHERS.search(command) and not process.has_torch(pid)
    if one is None or is_launcher or _OUR_OWN.search(command):
        return None
    names = filter(None, (environ.get(name, "") for name in launchers.JOB_NAMES))
    return one._replace(command=command, names=tuple(names))


def _of_pid(pid: int) -> tuple[list[FoundWorld], list[FoundWorld]]:
    """Return the world of a rank or of a child of a rank, or the worlds of their launcher; and all
    worlds on this machine.
    """
    if process.read_stat(pid) is None:
        raise EvidenceError(f"There is no process {pid} on this machine.")
    refuse_foreign(pid)
    below = set(process.descendants(pid, ()))
    here = all_worlds({pid, *below} if below else ())
    # The rank that this process or its ancestor is decides first, then the ranks below it: a shell
    # may have started two jobs.
    for family in (ancestors_of(pid), below):
        matching = [world for world in here if not world.pids.isdisjoint(family)]
        if matching:
            return matching, here
    return [_spawned(pid, below)], here


def _spawned(pid: int, below: set[int]) -> FoundWorld:
    """Return the processes with torch below a process: torch.multiprocessing's ranks have no rank
    in their environment.
    """
    # multiprocessing's own processes, and workers of a data loader: their parent is a rank
    helpers = ("resource_tracker", "forkserver", "compile_worker")
    with_torch = sorted(
        one
        for one in below
        if process.has_torch(one) and not any(name in process.command_line(one) for name in helpers)
    )
    if not with_torch and process.has_torch(pid):
        with_torch = [pid]
    if not with_torch:
        raise EvidenceError(
            f"Neither the process {pid} ({process.short_command_of(pid)}) nor its children are"
            " ranks: none of them has loaded torch."
        )
    size, command = len(with_torch), process.command_line(pid)
    ranks = [
        RankProcess(-1, one, job_dirs.start_ticks(one), local_size=size, command=command)
        for one in with_torch
    ]
    return FoundWorld(ranks, [])


def refuse_foreign(pid: int) -> None:
    """Raise an EvidenceError if this user may not look at a process."""
    try:
        Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        owner = Path(f"/proc/{pid}").stat().st_uid
        if owner != os.geteuid():
            why = (
                f"belongs to the user {_user(owner)}: only that user or root can look at it (`sudo"
                f" commlens attach {pid}`)"
            )
        elif os.geteuid() == 0:
            why = f"cannot be read: {pyspy.NO_CAPABILITY}"
        else:
            why = (
                "has more privileges than you: only root can look at it (`sudo commlens attach"
                f" {pid}`)"
            )
        raise EvidenceError(f"The process {pid} ({process.short_command_of(pid)}) {why}.") from None
    except OSError:
        return


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _with_expected(ranks: list[RankProcess]) -> FoundWorld:
    """Return a world with the ranks that this machine should have, from torchrun's environment: its
    ranks on one node follow each other.
    """
    first = ranks[0]
    is_one_node = len({job_dirs.parent_of(one.pid) for one in ranks}) == 1
    if not first.local_size or first.local_rank is None or not is_one_node:
        return FoundWorld(ranks, [])
    start = first.rank - first.local_rank
    return FoundWorld(ranks, list(range(start, start + first.local_size)))
