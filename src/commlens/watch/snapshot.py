"""Snapshots of a job on this node: its black boxes, joined with observations of its processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.blackbox import rank_claims
from commlens.errors import FormatError
from commlens.model.ranklog import Observation, RankLog
from commlens.processes.observer import Observer, Pulse
from commlens.processes.process import ProcessEnding
from commlens.processes.store_address import look_at_store
from commlens.watch.helper_stacks import HelperStacks
from commlens.watch.roster import Member, Roster
from commlens.watch.strangers import meeting_address, why_unrecorded

if TYPE_CHECKING:
    from commlens.watch.node_health import HealthOfNode

_LOOK_EVERY_S = 0.1


def add_new_members(roster: Roster, observer: Observer) -> list[Member]:
    """Find new processes and observe those that are visible. Returns the new members."""
    new = roster.refresh()
    for member in new:
        if member.here and member.box is not None:
            observer.add(member.pid, member.start_ticks, member.box.classifier())
        elif member.here:
            observer.add(member.pid, member.start_ticks)
    return new


def sample(members: Sequence[Member], observer: Observer) -> None:
    """Sample the members' processes, with the signs of life in their boxes as of the last poll."""
    for member in members:
        if member.alive and member.here:
            now = member.status if member.unreadable is None else None
            pulse = (
                Pulse(now.heartbeat_mono_ns, now.main_stack_since_mono_ns, now.issued, now.closed)
                if now is not None
                else Pulse()
            )
            observer.sample(member.pid, pulse)


def read_logs(
    members: list[Member],
    observations: dict[int, Observation],
    *,
    newest: int | None = None,
    with_nccl: bool = True,
) -> tuple[list[RankLog], list[str]]:
    """Read the members' boxes, or only the ``newest`` records of each, perhaps without NCCL's.

    A rank without a box gets an empty log: it has not imported torch, ended before that, or is not
    recorded.

    Returns:
        The logs, each with its observation, and what could not be read, in sentences.
    """
    logs: list[RankLog] = []
    problems: list[str] = []
    joined = have_joined(members) if newest is None else None
    for member in members:
        log: RankLog | None = None
        if member.box is not None:
            try:
                log = member.box.log(newest=newest, with_nccl=with_nccl)
            except FormatError as error:
                problems.append(str(error))
        if log is None:
            log = log_without_records(member, joined=joined)
        log.observation = observations.get(member.pid, Observation())
        if member.alive and member.here:
            _add_store(log)
        logs.append(log)
    _add_twins(logs, {member.box.path.parent for member in members if member.box is not None})
    return one_run(logs), problems


def _add_store(log: RankLog) -> None:
    """Add what is seen of the store in which a rank waits, or meets the others."""
    last = log.store_wait or (log.setups[-1] if log.setups else None)
    if last is not None and last.in_flight and (place := meeting_address(last)):
        log.observation.store = look_at_store(log.pid, *place)


def _add_twins(logs: Sequence[RankLog], folders: Iterable[Path]) -> None:
    """Add the processes that have a rank, where there are several."""
    for folder in folders:
        with contextlib.suppress(OSError):
            twins = rank_claims.twins(folder)
            for log in logs if twins else ():
                log.twins = [
                    (claim.pid, claim.started_by) for claim in twins.get(log.rank, [])
                ] or log.twins


def have_joined(members: Sequence[Member]) -> bool:
    """Return whether a rank has passed ``init_process_group``."""
    return any(member.status is not None and member.status.initialised for member in members)


def log_without_records(member: Member, *, joined: bool | None) -> RankLog:
    """Return the log of a rank that has no box, or whose box cannot be read.

    Args:
        member: the rank.
        joined: :func:`have_joined`, to find out why a rank is not recorded; None: do not look.
    """
    log = RankLog(
        rank=member.rank,
        world_size=member.world_size,
        host=os.uname().nodename,
        pid=member.pid,
        local_rank=member.local_rank,
        restart=member.restart,
        captured_ns=time.time_ns(),
    )
    if member.box is not None:
        log.issued, log.initialised, log.problems = 1, True, ["its black box cannot be read"]
    elif joined is not None and member.alive and member.here:
        log.unrecorded = why_unrecorded(member.pid, joined=joined)
    return log


def one_run(logs: list[RankLog]) -> list[RankLog]:
    """Give the logs of one run of a job one name, which ranks without a box lack, and one restart
    count.

    torchelastic counts a restart only on the node whose workers failed.
    """
    job = next((log.job for log in logs if log.job), "")
    restart = max((log.restart for log in logs), default=0)
    for log in logs:
        log.job, log.restart = log.job or job, restart
    return logs


def observe(
    roster: Roster, observer: Observer, *, window_s: float, wait_s: float = 2.0
) -> dict[int, Observation]:
    """Observe a roster's processes for ``window_s`` seconds, and wait at most ``wait_s`` seconds
    for py-spy. Returns the observations by pid.
    """
    add_new_members(roster, observer)
    end = time.monotonic() + window_s
    while True:
        roster.wait(0)
        roster.read_headers()
        for member in roster.take_ended():
            observer.ended(member.pid, member.ending or ProcessEnding(), clean=member.said_goodbye)
        sample(roster.current(), observer)
        left = end - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(_LOOK_EVERY_S, left))
    found = {
        member.pid: observer.observe(member.pid, wait_s=wait_s)
        for member in roster.current()
        if member.here
    }
    if window_s:  # not for each frame of `commlens top`
        HelperStacks().add(roster.current(), found)
    return found


def snapshot(
    job_dir: Path, *, window_s: float = 1.0, health: HealthOfNode | None = None
) -> list[RankLog]:
    """Read all black boxes of a job, and observe its processes for a moment.

    Args:
        job_dir: the job's folder of boxes, from :func:`commlens.blackbox.job_dirs.live_jobs`.
        window_s: how long to observe the processes: whether one works or sleeps shows only over
            time.
        health: of this node's hardware, to be added to the first log.
    """
    with contextlib.closing(Roster([job_dir])) as roster:
        observations = observe(roster, Observer(), window_s=window_s)
        members = roster.current()
        logs, _ = read_logs(members, observations)
    if health is not None and logs:
        health.add(members)
        logs[0].health = health.report(members)
    return logs


def dump(
    directory: str | Path, job_dir: Path, *, window_s: float = 0.5, keep: int, mode: int
) -> Path:
    """Copy a job's black boxes, and what is observed of its processes, into a folder below
    ``directory``.

    Args:
        directory: the job's folder is created in it.
        job_dir: of the job's black boxes.
        window_s: how long to observe the processes.
        keep: how many jobs' dumps to keep there.
        mode: permissions of the files.

    Returns:
        The dump's folder.

    Raises:
        DumpError: nothing could be saved, or a file could not be written.
    """
    from commlens.dumps import save

    with contextlib.closing(Roster([job_dir])) as roster:
        observations = observe(roster, Observer(), window_s=window_s)
        by_rank = {
            member.rank: observations[member.pid]
            for member in roster.current()
            if member.pid in observations
        }
    return save.save_dump(
        job_dir, Path(directory), by_rank, host=os.uname().nodename, keep=keep, mode=mode
    )
