"""The logs of other jobs on this node that share a group with the watched one: programs with
default groups of their own, which meet in groups made by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commlens.diagnosis.select.worlds import join_worlds
from commlens.model.ranklog import RankLog
from commlens.model.store_identity import identities, joined_runs
from commlens.processes.observer import Observer
from commlens.watch.jobs import is_over
from commlens.watch.roster import Roster
from commlens.watch.snapshot import observe, read_logs

_OBSERVED_S: Final = 0.5
_ENDED_S: Final = 30.0
"""This job does not wait for one that ended longer ago."""


def with_other_worlds(
    logs: Sequence[RankLog], folders: Sequence[Path], *, observed_s: float = _OBSERVED_S
) -> list[RankLog]:
    """Return a job's logs with those of the jobs that share a group made by hand with it, as one
    job.

    Args:
        logs: of the watched job.
        folders: of its boxes; the other jobs' folders are beside them.
        observed_s: for how long to observe the processes of the other jobs.
    """
    others = logs_of_other_worlds(logs, folders, observed_s=observed_s)
    return join_worlds([logs, *others.values()])


def logs_of_other_worlds(
    logs: Sequence[RankLog], folders: Sequence[Path], *, observed_s: float = _OBSERVED_S
) -> dict[Path, list[RankLog]]:
    """Return the logs of each job that groups made by hand join with this one, directly or through
    another job, by the job's folder. Without such a group, nothing is read. The arguments are those
    of :func:`with_other_worlds`.
    """
    if not identities(logs):
        return {}
    own = Path()
    others = {
        other: _read(other, observed_s=None)
        for folder in folders
        if folder.parent.is_dir()
        for other in folder.parent.iterdir()
        if other not in folders and other.is_dir() and not is_over(other, _ENDED_S)
    }
    joined = joined_runs({own: logs, **others}, own) - {own}
    return {other: _read(other, observed_s=observed_s) for other in sorted(joined)}


def _read(job: Path, *, observed_s: float | None) -> list[RankLog]:
    with contextlib.closing(Roster([job])) as roster:
        observations = {}
        if observed_s is None:
            roster.refresh()
        else:
            observations = observe(roster, Observer(), window_s=observed_s)
        return read_logs(roster.current(), observations)[0]
