"""Ranks among the processes of this machine, recognised by their environment."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from commlens import launchers
from commlens.blackbox import job_dirs
from commlens.processes import process


class RankProcess(NamedTuple):
    """A rank's process as its environment or its launcher describes it."""

    rank: int  # -1: unknown
    pid: int
    start_ticks: int
    world_size: int = 0  # 0: unknown
    local_rank: int | None = None
    restart: int = 0  # torchelastic's restart count
    local_size: int = 0  # number of ranks on this node; 0: unknown
    command: str = ""  # its command line, or that of the program that started it
    names: tuple[str, ...] = ()  # by which a user may call the job


def rank_process(
    pid: int,
    environ: Mapping[str, str],
    names: Iterable[str] = launchers.RANK,
    *,
    stat: process.Stat | None = None,
) -> RankProcess | None:
    """Return the rank that a process is; None if it has ended, or its environment names no rank.

    Args:
        pid: the process.
        environ: its environment.
        names: the variables that may hold the rank.
        stat: its state; by default, as of now.
    """
    rank = launchers.number(environ, names)
    stat = stat or (process.read_stat(pid) if rank >= 0 else None)
    if rank < 0 or stat is None or stat.ended:
        return None
    local_rank = launchers.number(environ, launchers.LOCAL_RANK)
    return RankProcess(
        rank,
        pid,
        stat.start_ticks,
        launchers.number(environ, launchers.WORLD_SIZE, 0),
        local_rank if local_rank >= 0 else None,
        launchers.number(environ, ["TORCHELASTIC_RESTART_COUNT"], 0),
        launchers.number(environ, [launchers.LOCAL_WORLD_SIZE], 0),
    )


def python_processes() -> Iterator[tuple[int, dict[str, str]]]:
    """Return the pid and the environment of each Python process that this user may look at."""
    return ((pid, process.environment(pid)) for pid in process.pids() if process.runs_python(pid))


def one_of_each(candidates: Sequence[RankProcess]) -> list[RankProcess]:
    """Return one process for each rank, by rank.

    A rank's children and the program that started it have its environment, too: the one with torch
    counts, or else the parent. A process of an earlier job that met at the same port may still be
    there: of unrelated processes, the newest one counts.
    """
    newest = max((one.restart for one in candidates), default=0)
    loaded = functools.cache(process.has_torch)
    best: dict[int, RankProcess] = {}
    for one in sorted(candidates, key=lambda one: one.start_ticks):
        known = best.get(one.rank)
        if one.restart == newest and (
            known is None
            or (loaded(one.pid), known.pid not in ancestors_of(one.pid))
            > (loaded(known.pid), False)
        ):
            best[one.rank] = one
    return [best[rank] for rank in sorted(best)]


def ancestors_of(pid: int) -> list[int]:
    """Return a process and its parents, without the init process."""
    found = [pid]
    while (parent := job_dirs.parent_of(found[-1])) > 1 and parent not in found:
        found.append(parent)
    return found
