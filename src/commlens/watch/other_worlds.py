"""The logs of other jobs on this node that share a group made by hand with the watched one: jobs
with a default group of their own (*worlds*), such as an inference engine beside a trainer.

:func:`with_other_worlds` joins them to one job, in which ranks become numbers of processes: of a
trainer with 4 ranks and an engine with 2, the engine's rank 1 may have number 5.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from commlens.diagnosis.select.worlds import join_worlds
from commlens.model.ranklog import Observation, RankLog
from commlens.model.store_identity import identities, joined_runs
from commlens.processes.observer import Observer
from commlens.watch.jobs import is_over
from commlens.watch.roster import Roster
from commlens.watch.snapshot import observe, read_logs
from commlens.watch.strangers import near_processes

_OBSERVED_S: Final = 0.5
_AGAIN_S: Final = 5.0  # between two looks at a job that shares no group
_ENDED_S: Final = 30.0
"""No rank waits for a job that ended longer ago."""


def reading_of(log: RankLog) -> tuple[str, int, int]:
    """Return what identifies a log although its rank becomes a number: host, pid and the moment of
    reading. The first two alone do not: containers of one host may have the same pids.
    """
    return log.host, log.pid, log.captured_ns


def with_other_worlds(
    logs: Sequence[RankLog],
    folders: Sequence[Path],
    elsewhere: Sequence[Sequence[RankLog]] = (),
) -> list[RankLog]:
    """Return a job's logs with those of the jobs that share a group made by hand with it, as one
    job. If members of such a group are not known, look for processes that may be these.

    Args:
        logs: of the watched job.
        folders: of its boxes; the other jobs' folders are beside them.
        elsewhere: the logs of jobs that may share such a group, as their own watchers sent them.
    """
    runs = [logs, *logs_of_other_worlds(logs, folders).values()]
    return with_near_processes(join_runs(runs, elsewhere))


def with_near_processes(joined: list[RankLog]) -> list[RankLog]:
    """Look for processes that may be members without a record, and return the logs with these."""
    if any(each.size for log in joined[:1] for each in log.worlds.outsiders):
        worlds = msgspec.structs.replace(joined[0].worlds, near=near_processes(joined))
        for log in joined:
            log.worlds = worlds
    return joined


def join_runs(
    here: Sequence[Sequence[RankLog]], elsewhere: Sequence[Sequence[RankLog]]
) -> list[RankLog]:
    """Return the logs of the first job and of those that groups made by hand join with it, as one
    job.

    Args:
        here: the logs of jobs as they were read on this node, the watched one first.
        elsewhere: the logs of jobs as their own watchers sent them.
    """
    runs = [[*logs] for logs in here]
    for job in elsewhere:
        known = {_process_of(log) for run in runs for log in run}
        if job and known.isdisjoint(map(_process_of, job)):
            whole = next((run for run in runs if _are_one_world(run, job)), None)
            if whole is not None:
                whole += job
            else:
                runs.append([*job])
    return join_worlds([runs[at] for at in sorted(joined_runs(dict(enumerate(runs)), 0))])


def _process_of(log: RankLog) -> tuple[str, str, int, int]:
    return log.job, log.host, log.pid, log.rank


def _are_one_world(some: Sequence[RankLog], others: Sequence[RankLog]) -> bool:
    """Return whether logs from two nodes are of one world, whose nodes have not met: without a
    default group, they have no store in common.
    """
    one, other = some[0], others[0]
    is_same_job = one.job == other.job or (
        one.script == other.script
        and all(
            op.channel.group.hand_made is not None
            for log in (*some, *others)
            for op in (*log.setups, *log.collectives)
        )
    )
    ranks = {log.rank for log in some}
    return (
        is_same_job
        and one.world_size == other.world_size
        and ranks.isdisjoint(log.rank for log in others)
    )


def logs_of_other_worlds(
    logs: Sequence[RankLog], folders: Sequence[Path]
) -> dict[Path, list[RankLog]]:
    """Return the logs of each job that groups made by hand join with this one, directly or through
    another job, by the job's folder. Without such a group, nothing is read. The arguments are those
    of :func:`with_other_worlds`.
    """
    with contextlib.closing(OtherWorlds(window_s=_OBSERVED_S)) as others:
        return others.logs(logs, folders)


class OtherWorlds:
    """The jobs on this node that share a group made by hand with a watched one, look by look. A job
    that shares none is looked at again only after some seconds.

    Args:
        window_s: for how long to observe the processes of the joined jobs in each look; 0: from one
            look to the next.
        observes: whether to observe processes at all, which costs more than to read boxes.
        newest: of how many records of each rank to read; None: all.
    """

    def __init__(
        self, *, window_s: float = 0.0, observes: bool = True, newest: int | None = None
    ) -> None:
        self._window_s = window_s
        self._observes = observes
        self._newest = newest
        self._apart: dict[Path, float] = {}  # when a job was found not to be joined
        self._known: dict[Path, tuple[Roster, Observer]] = {}

    def logs(self, logs: Sequence[RankLog], folders: Sequence[Path]) -> dict[Path, list[RankLog]]:
        """Return the logs of each job that is joined with this one, by the job's folder."""
        if not identities(logs):
            return {}
        own, now = Path(), time.monotonic()  # no job's folder stands for the watched job
        others = {
            other: self._read(other)
            for folder in folders
            if folder.parent.is_dir()
            for other in folder.parent.iterdir()
            if other not in folders
            and now - self._apart.get(other, -_AGAIN_S) >= _AGAIN_S
            and other.is_dir()
            and not is_over(other, _ENDED_S)
        }
        joined = joined_runs({own: logs, **others}, own) - {own}
        self._forget(self._known.keys() - joined)
        self._apart |= dict.fromkeys(others.keys() - joined, now)
        return {
            other: self._read(other, self._window_s) if self._window_s else others[other]
            for other in sorted(joined)
        }

    def close(self) -> None:
        """Close all boxes."""
        self._forget({*self._known})

    def _read(self, job: Path, window_s: float = 0.0) -> list[RankLog]:
        if job not in self._known:
            self._known[job] = Roster([job]), Observer()
        roster, observer = self._known[job]
        seen: dict[int, Observation] = {}
        if self._observes:
            seen = observe(roster, observer, window_s=window_s, wait_s=window_s)
        else:
            roster.refresh()
            roster.read_headers()
        return read_logs(roster.current(), seen, newest=self._newest)[0]

    def _forget(self, jobs: Collection[Path]) -> None:
        for job in jobs:
            self._known.pop(job)[0].close()
