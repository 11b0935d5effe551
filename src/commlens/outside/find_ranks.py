"""Find the ranks of jobs on this machine that nothing records: by environment, process tree and
command line.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from commlens import launchers
from commlens.blackbox import job_dirs
from commlens.errors import CommandError, EvidenceError
from commlens.processes import process
from commlens.processes.process import command_line, has_torch
from commlens.text import INLINE_CODE, count, ranks_phrase

_SAME_JOB: Final = ("WORLD_SIZE", *launchers.PLACES, *launchers.STARTS)
_LAUNCHERS: Final = re.compile(
    r"(torchrun|accelerate|deepspeed|torch\.distributed\.(run|launch)|mpirun|mpiexec|srun|commlens"
    r" launch)\b"
)
_OUR_OWN: Final = re.compile(r" -m commlens\.(watch|verification)\b")
"""Helpers of a recorded rank, which have its environment."""
NO_CAPABILITY: Final = (
    "the capability SYS_PTRACE is missing: start the container with `--cap-add SYS_PTRACE`, or look"
    " from the host as root"
)
_COMMAND_MAX: Final = 80
_CODE_FOLLOWS: Final = re.compile("-[A-Za-z]*c")


class RankProcess(NamedTuple):
    """A rank's process. The rank is -1 if its environment does not say it."""

    rank: int
    world_size: int
    local_rank: int  # -1: unknown
    pid: int
    start_ticks: int
    command: str
    names: tuple[str, ...]  # by which a user may call the job
    local_world_size: int = 0
    restart: int = 0


class FoundJob(NamedTuple):
    """The ranks of one job on this machine, by rank."""

    ranks: list[RankProcess]
    expected: list[int]  # ranks that this machine should have; empty: unknown

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
        return f"{who} of {script_of(first.command)} (pid {first.pid})"


def find_job(wanted: str | None, job_name: str | None = None) -> FoundJob:
    """Return one job on this machine.

    Args:
        wanted: a pid, of a rank, its launcher or one of its children, or a part of the command
            line; None: the only job here.
        job_name: torchrun's ``--rdzv-id``, Slurm's job id or name.

    Raises:
        CommandError: several jobs match.
        EvidenceError: no job matches, or its processes belong to another user.
    """
    if wanted is not None and wanted.isdecimal():
        return _of_pid(int(wanted))
    jobs = find_jobs()
    if wanted is not None:
        jobs = [job for job in jobs if any(wanted in one.command for one in job.ranks)]
    if job_name is not None:
        jobs = [job for job in jobs if any(job_name in one.names for one in job.ranks)]
    if len(jobs) == 1:
        return jobs[0]
    about = f" that match {wanted or job_name!r}" if wanted or job_name else ""
    if not jobs:
        raise EvidenceError(
            f"No ranks of a distributed job{about} run on this machine{_as_this_user()}. Give the"
            " pid of a rank or of its launcher."
        )
    raise CommandError(
        f"Several jobs{about} run on this machine: {'; '.join(job.label for job in jobs[:8])}. Give"
        " the pid of one rank."
    )


def find_jobs(launcher: int | None = None) -> list[FoundJob]:
    """Return the jobs of this machine that this user may look at, oldest first.

    Args:
        launcher: of two processes that are the same rank of the same job, the one below this
            process counts.
    """
    found: dict[tuple[str, ...], list[RankProcess]] = {}
    for pid in process.pids():
        environ = process.environment(pid) if process.runs_python(pid) else {}
        one = _rank_process(pid, environ)
        if one is not None and one.rank >= 0:
            key = tuple(environ.get(name, "") for name in _SAME_JOB)
            found.setdefault(key, []).append(one)
    if launcher is not None:
        for ranks in found.values():
            near = [one for one in ranks if launcher in ancestors_of(one.pid)]
            ranks[:] = near + [
                one for one in ranks if one.rank not in {other.rank for other in near}
            ]
    jobs = [FoundJob(_one_of_each(ranks), []) for ranks in found.values()]
    return sorted(
        (_with_expected(job) for job in jobs if job.ranks),
        key=lambda job: min(one.start_ticks for one in job.ranks),
    )


def _of_pid(pid: int) -> FoundJob:
    """Return the job of a rank, of its launcher, or of a child of a rank."""
    if process.read_stat(pid) is None:
        raise EvidenceError(f"There is no process {pid} on this machine.")
    refuse_foreign(pid)
    below = set(process.descendants(pid, ()))
    jobs = find_jobs(launcher=pid if below else None)
    # A rank itself or a child of a rank decides before a launcher: two jobs may be children of one
    # shell.
    for family in (ancestors_of(pid), below):
        matching = [job for job in jobs if any(one.pid in family for one in job.ranks)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise CommandError(
                f"The process {pid} started several jobs:"
                f" {'; '.join(job.label for job in matching[:8])}. Give a rank's pid."
            )
    return _spawned(pid, below)


def _spawned(pid: int, below: set[int]) -> FoundJob:
    """Return the processes with torch below a process: torch.multiprocessing's ranks have no rank
    in their environment.
    """
    with_torch = sorted(one for one in below if has_torch(one) and not _is_a_helper(one))
    if not with_torch and has_torch(pid):
        with_torch = [pid]
    if not with_torch:
        raise EvidenceError(
            f"Neither the process {pid} ({short_command_of(pid)}) nor its children are ranks: none"
            " of them has loaded torch."
        )
    ranks = [
        RankProcess(
            -1, 0, -1, one, job_dirs.start_ticks(one), command_line(pid), (), len(with_torch)
        )
        for one in with_torch
    ]
    return FoundJob(ranks, [])


def _is_a_helper(pid: int) -> bool:
    """Return whether a process is multiprocessing's own, or a worker of a data loader: its parent
    is a rank, not it.
    """
    command = command_line(pid)
    return "resource_tracker" in command or "forkserver" in command or "compile_worker" in command


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
            why = f"cannot be read: {NO_CAPABILITY}"
        else:
            why = (
                "has more privileges than you: only root can look at it (`sudo commlens attach"
                f" {pid}`)"
            )
        raise EvidenceError(f"The process {pid} ({short_command_of(pid)}) {why}.") from None
    except OSError:
        return


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _as_this_user() -> str:
    return (
        ""
        if os.geteuid() == 0
        else f" as {_user(os.geteuid())}; the processes of other users are not visible to you"
    )


def _rank_process(pid: int, environ: Mapping[str, str]) -> RankProcess | None:
    rank = launchers.number(environ, launchers.RANK)
    stat = process.read_stat(pid)
    if rank < 0 or stat is None or stat.ended:
        return None
    command = command_line(pid)
    if _OUR_OWN.search(command) or (_LAUNCHERS.search(command) and not has_torch(pid)):
        return None
    return RankProcess(
        rank,
        launchers.number(environ, launchers.WORLD_SIZE, 0),
        launchers.number(environ, launchers.LOCAL_RANK),
        pid,
        stat.start_ticks,
        command,
        tuple(filter(None, (environ.get(name, "") for name in launchers.JOB_NAMES))),
        launchers.number(environ, [launchers.LOCAL_WORLD_SIZE], 0),
        launchers.number(environ, ["TORCHELASTIC_RESTART_COUNT"], 0),
    )


def _one_of_each(candidates: list[RankProcess]) -> list[RankProcess]:
    """Return one process for each rank.

    A rank's children and the program that started it have its environment, too. A process of an
    earlier job that met at the same port may still be there: the newest one counts.
    """
    newest = max(one.restart for one in candidates)
    with_torch = {one.pid for one in candidates if has_torch(one.pid)}
    best: dict[int, RankProcess] = {}
    for one in sorted(
        (one for one in candidates if one.restart == newest), key=lambda one: one.start_ticks
    ):
        known = best.get(one.rank)
        if (
            known is not None
            and known.pid in with_torch
            and (one.pid not in with_torch or is_below(one.pid, known.pid))
        ):
            continue
        best[one.rank] = one
    return [best[rank] for rank in sorted(best)]


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process is a child of another one, or of a child of it."""
    return ancestor in ancestors_of(pid)[1:]


def ancestors_of(pid: int) -> list[int]:
    """Return a process and its parents, without the init process."""
    found = [pid]
    while (parent := job_dirs.parent_of(found[-1])) > 1 and parent not in found:
        found.append(parent)
    return found


def _with_expected(job: FoundJob) -> FoundJob:
    """Add the ranks that this machine should have, from torchrun's environment: its ranks on one
    node follow each other.
    """
    first = job.ranks[0]
    if not first.local_world_size or first.local_rank < 0:
        return job
    start = first.rank - first.local_rank
    if len({job_dirs.parent_of(one.pid) for one in job.ranks}) > 1:  # several nodes on one machine
        return job
    return job._replace(expected=list(range(start, start + first.local_world_size)))


def short_command_of(pid: int) -> str:
    """Return the command line of a process without code that it holds: ``"python -c '...'"``."""
    command = command_line(pid)
    words = command.split(" ")
    for position, word in enumerate(words[1:], 1):
        if _CODE_FOLLOWS.fullmatch(word):
            return " ".join([*words[: position + 1], "'...'"])
        if not word.startswith("-"):
            break
    return command


def script_of(command: str) -> str:
    """Return the program in a Python command line, without the interpreter and its options;
    ``"python -c '...'"`` for code.
    """
    words = command.split(" ")
    for position, word in enumerate(words[1:], 1):
        if _CODE_FOLLOWS.fullmatch(word):
            return INLINE_CODE
        if word == "-m":
            return _cut(" ".join(words[position + 1 :]))
        if not word.startswith("-"):
            return _cut(" ".join([word.rpartition("/")[2], *words[position + 1 :]]))
    return _cut(command)


def _cut(command: str) -> str:
    return command if len(command) <= _COMMAND_MAX else f"{command[:_COMMAND_MAX]}..."
