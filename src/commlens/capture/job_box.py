"""The rank's black box in the job's folder of memory-backed files, and the node's watcher
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commlens import config, helper_process, launchers
from commlens.blackbox import job_dirs, rank_claims
from commlens.capture import rank_environment
from commlens.capture.rank_environment import PlaceInJob
from commlens.text import INLINE_CODE

log = logging.getLogger("commlens")
_SCARCE = 64 << 20  # bytes; /dev/shm of a container has no more unless it is asked for
_KEEP_S = 60.0
_KEEP_UNUSED_S = 600.0
_LOCK_S = 5.0
_CLAIM = ".watcher"
_SECOND_CLAIM = ".watcher-2"
_LOOK_FOR_WATCHER_NS = 5_000_000_000


def folder_of(settings: config.Settings, place: PlaceInJob, *, early: bool) -> str | None:
    """Return the name of the job's folder, or its path if it is the one of an ancestor's job; None
    if this process is no rank.

    A rank's child is a worker, however it was started, unless it calls ``init_process_group`` with
    a rank of its own, as the ranks do that Lightning starts from rank 0. A process that has
    destroyed its groups, or is alone in one, is no rank of its children's job: test suites start
    ranks after they have been one.
    """
    own = settings.job or job_dirs.job_identity(os.environ, place.meeting)
    found = _ancestor(settings)
    if found is None:
        return own
    box, parent = found
    if early:  # the environment, which workers inherit, says nothing
        return None
    if parent.left or (parent.setup and parent.world_size == 1):
        return own
    if parent.setup and parent.rank == place.rank:  # a worker that uses the rank's environment
        return None
    if parent.world_size == place.world_size:  # one of the ranks that Lightning starts
        taken = {
            job_dirs.box_rank(other)
            for other in job_dirs.boxes(box.parent)
            if job_dirs.has_ended(other) is False
        }
        return None if place.rank in taken - {parent.rank} else str(box.parent)
    return None if parent.setup else own


def twin_of(settings: config.Settings, place: PlaceInJob) -> str:
    """Say that another process has this one's rank; empty if none does.

    A script that spawns its ranks may be started by a launcher as well. Then each of the launcher's
    workers spawns all ranks. They may come at the same moment, so each notes its claim before it
    looks for others. Processes that are no children of ranks note nothing.
    """
    found = _ancestor(settings)
    if found is None or place.rank < 0 or not place.meeting:
        return ""
    box, parent = found
    mine = rank_claims.claim_rank(
        box.parent, place.rank, place.meeting, place.world_size, parent.pid
    )
    ranks = {job_dirs.box_pid(one): job_dirs.box_rank(one) for one in job_dirs.boxes(box.parent)}
    for other in rank_claims.twins(box.parent).get(place.rank, []):
        if (
            other.group == mine.group
            and other.started_by != mine.started_by
            and not job_dirs.process_has_ended(other.pid, other.start_ticks)
        ):
            started = [
                f"process {one.pid}, which rank {ranks.get(one.started_by)} (pid {one.started_by})"
                " started"
                for one in (mine, other)
            ]
            script = Path(sys.argv[0]).name if sys.argv[0] not in ("", "-c") else "the script"
            return (
                f"rank {place.rank} exists twice: {started[0]}, and {started[1]}. The launcher"
                f" starts ranks, and so does {script}: start {script} without the launcher"
            )
    return ""


def make_box(
    settings: config.Settings,
    folder: str,
    place: PlaceInJob,
    box_writer: Callable[..., Any],
) -> tuple[Path, Any] | None:
    """Make the black box of a rank in the first folder that has room.

    Args:
        settings: the settings.
        folder: from :func:`folder_of`.
        place: of the process in its job.
        box_writer: makes the box, given its path and the fields of its header.

    Returns:
        The job's folder and the box; None, with one line in the log, if no folder has room.
    """
    problems: list[str] = []
    for root in job_dirs.box_roots(settings.box_dir):
        try:
            job_dir = job_dirs.user_folder(root) / folder
            job_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(job_dir):
                _move_stale_boxes(job_dir)
                _free_ended_boxes(job_dir)
                return job_dir, box_writer(
                    job_dir / job_dirs.box_name(place.rank, os.getpid()),
                    capacity=settings.box_entries,
                    rank=place.rank,
                    world_size=place.world_size,
                    local_rank=rank_environment.local_rank(),
                    start_ticks=job_dirs.start_ticks(os.getpid()),
                    about=_header_json(job_dir.name)
                    | {
                        "stall_timeout": settings.stall_ceiling_s,
                        "world": settings.world
                        or launchers.world_of(os.environ, _command_line(os.getpid())),
                    },
                )
        except OSError as error:
            problems.append(f"{root}: {error.strerror or error}")
    where = (
        "; ".join(problems) or "no memory-backed folder found (set COMMLENS_BOX_DIR to name one)"
    )
    log.warning("commlens: rank %d is not recorded: %s", place.rank, where)
    return None


@contextlib.contextmanager
def _locked(job_dir: Path) -> Iterator[None]:
    """Lock a job's folder, but do not wait long: the process that has the lock may be stopped, and
    this one is importing torch.
    """
    with (job_dir / ".lock").open("w") as lock:
        until = time.monotonic() + _LOCK_S
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield


def _ancestor(settings: config.Settings) -> tuple[Path, job_dirs.BoxOwner] | None:
    """Return the box of the nearest ancestor that has one, and its owner."""
    owners = {
        job_dirs.box_pid(box): box
        for job in job_dirs.live_jobs(settings.box_dir)
        for box in job_dirs.boxes(job)
        if job_dirs.has_ended(box) is False
    }
    pid = os.getppid()
    for _ in range(64):
        if pid <= 1:
            return None
        if pid in owners:
            owner = job_dirs.owner(owners[pid])
            return None if owner is None else (owners[pid], owner)
        pid = job_dirs.parent_of(pid)
    return None


def _move_stale_boxes(job_dir: Path) -> None:
    """Move away the boxes of an earlier job with the same name, whose processes ended before this
    one started.

    Nobody needs those of processes that ended well: test suites start many jobs at one meeting
    point.
    """
    started = time.time() - _age_s()
    for box in job_dirs.boxes(job_dir):
        with contextlib.suppress(OSError):
            if job_dirs.is_leftover(box, before_s=started - 1):
                if (owner := job_dirs.owner(box)) is not None and owner.said_goodbye:
                    job_dirs.remove_box(box)
                    continue
                aside = job_dir.with_name(f"{job_dir.name}.before-{int(box.stat().st_mtime)}")
                aside.mkdir(mode=0o700, exist_ok=True)
                box.rename(aside / box.name)
                events = job_dirs.events_file(job_dir, job_dirs.box_pid(box))
                if events.exists():
                    events.rename(aside / events.name)
    if not any(job_dirs.has_ended(box) is False for box in job_dirs.boxes(job_dir)):
        for claim in (_CLAIM, _SECOND_CLAIM):
            (job_dir / claim).unlink(missing_ok=True)  # of watchers of that job
        for told in job_dir.glob(f"{job_dirs.TOLD}*"):
            told.unlink(missing_ok=True)


def _free_ended_boxes(job_dir: Path) -> None:
    """Free the boxes of other jobs' processes that ended: soon if memory is scarce, later if they
    never called init_process_group.

    A process that is killed at once starts no watcher that would free them.
    """
    is_scarce = shutil.disk_usage(job_dir).free < _SCARCE
    before_s = time.time() - (_KEEP_S if is_scarce else _KEEP_UNUSED_S)
    for job in [job for job in job_dir.parent.iterdir() if job != job_dir]:
        for box in job_dirs.boxes(job):
            owner = job_dirs.owner(box)
            if (is_scarce or (owner is not None and not owner.setup)) and job_dirs.is_leftover(
                box, before_s=before_s
            ):
                job_dirs.remove_box(box)


def _age_s() -> float:
    """Return the seconds since this process started."""
    try:
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - job_dirs.start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return 0.0


def _header_json(job: str) -> dict[str, Any]:
    """Return the JSON object of the box's header."""
    import torch

    from commlens.version import __version__

    return {
        "job": job,
        "host": platform.node(),
        **job_dirs.this_machine()._asdict(),
        "restart": launchers.number(os.environ, ["TORCHELASTIC_RESTART_COUNT"], 0),
        "launcher": launchers.launcher_of(os.environ),
        "env_world_size": launchers.number(os.environ, ["WORLD_SIZE"], 0),
        "script": " ".join(
            [INLINE_CODE, *sys.argv[1:]]
            if sys.argv[:1] == ["-c"]
            else launchers.command_of(sys.argv)
        )[:300],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commlens": __version__,
        "prefixes": {
            "torch": str(Path(torch.__file__).parent),
            "commlens": str(Path(__file__).parents[1]),
            "python": sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}),
        },
    }


def start_watcher(settings: config.Settings, job_dir: Path) -> int:
    """Start the node's watcher process, which survives a SIGKILL of this one. Only the lowest local
    rank does.

    Returns:
        Its pid; 0: another rank starts it.
    """
    local_rank = rank_environment.local_rank()
    if local_rank > 0 or (local_rank < 0 and not job_dirs.claim(job_dir / _CLAIM)):
        return 0
    return _start_watcher(settings, job_dir)


class WatcherReplacement:
    """Starts another watcher, once for a job, if none is running: it may have been killed, or the
    rank that should have started it.
    """

    def __init__(self, settings: config.Settings, job_dir: Path) -> None:
        self._settings = settings
        self._job_dir = job_dir
        stagger_ns = 250_000_000 * (max(rank_environment.local_rank(), 0) % 16)
        self._due = time.monotonic_ns() + _LOOK_FOR_WATCHER_NS + stagger_ns

    def look(self, now: int) -> None:
        """Look whether a watcher is running, if that is due; ``now`` is CLOCK_MONOTONIC in ns."""
        if now < self._due:
            return
        self._due = now + _LOOK_FOR_WATCHER_NS
        self.start()

    def start(self) -> None:
        """Start a watcher if none is running, which would hold its lock on the job's folder."""
        # None: the job is over
        if job_dirs.is_locked(self._job_dir) is False and job_dirs.claim(
            self._job_dir / _SECOND_CLAIM
        ):
            _start_watcher(self._settings, self._job_dir)


def _start_watcher(settings: config.Settings, job_dir: Path) -> int:
    environ = helper_process.environment({**os.environ, **config.settings_environment(settings)})
    return helper_process.start("commlens.watch", str(job_dir), environ=environ)


def end_watcher(pid: int, job_dir: Path | None) -> None:
    """End the watcher that this process started, so that one with other settings can be started; 0:
    there is none.
    """
    if pid and job_dir is not None and b"commlens.watch" in _command_line(pid):
        os.kill(pid, signal.SIGTERM)
        (job_dir / _CLAIM).unlink(missing_ok=True)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
