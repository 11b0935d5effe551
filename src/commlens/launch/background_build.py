"""Build the native engine in the background while a job runs, so that the next job of this torch
and Python records natively.

Only ``commlens launch`` starts a build, in a process of its own with the lowest priority, and never
waits for it. A rank never does: under another launcher, nothing is built. The process ends by
itself

* when the build is done or has failed, which :mod:`commlens.native.attempts` remembers;
* :data:`AFTER_JOB_S` after the launcher has ended. Until then it may go on, since it disturbs no
  process: it has its own session, no terminal and no open pipe, takes only idle time, and without
  this time the machines of people who run many short jobs would never get a build;
* when memory is short: compiling torch's headers takes 1.4 GB (torch 2.13, g++ 12), which must
  never be missing in the job.

Ended early, it removes its temporary files, and the next launch begins anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from commlens import helper_process, launchers, native
from commlens.blackbox import job_dirs
from commlens.config import Settings
from commlens.native import attempts, build, cache
from commlens.processes import cgroup

AFTER_JOB_S: Final = 120.0
"""How long a build may go on after the launcher's end."""

LIMIT_S: Final = 3600.0
"""How long a build may take in all: at the lowest priority, beside a job that uses all cores, it
hardly advances.
"""

FREE_TO_START: Final = 4 << 30
FREE_TO_GO_ON: Final = 1 << 30
"""Bytes of memory that must be free, of the machine's and of the container's."""

_LOOK_S: Final = 1.0


def start(settings: Settings) -> str:
    """Start a build if this launcher should. Return a sentence about it for the user; empty if
    nothing is built.

    Never raises, and takes some milliseconds.
    """
    try:
        if (
            not settings.auto_build
            or settings.engine == "python"
            or native.find() is not None
            or why_not()
        ):
            return ""
        lock = attempts.take_lock(_folder())
        if lock is None:
            return ""
        try:
            _start(lock)
        finally:
            os.close(lock)  # the process that builds has inherited it
    except Exception:
        # a folder that cannot be written, no room for a process: `commlens build-native` says what
        # is wrong
        return ""
    return (
        "the native engine is being built in the background, once for this torch and Python; the"
        " next job records with it. COMMLENS_AUTO_BUILD=0 forbids this."
    )


def why_not() -> str:
    """Return why a launcher would not build here although nothing is built yet, in a clause; empty
    if it would.
    """
    obstacle = build.obstacle()
    if obstacle:
        return obstacle.rstrip(".")
    failed = attempts.failure(_folder(), build.find_compiler(os.environ))
    if failed is not None:
        return (
            f"the build of {failed.when} failed, and commlens launch tries again after a day:"
            f" {failed.reason.rstrip('.')}"
        )
    free = cgroup.free_memory()
    if free is not None and free < FREE_TO_START:
        return (
            f"only {free / 1e9:.1f} GB of memory are free, and a build in the background waits"
            f" until {FREE_TO_START / 1e9:.1f} GB are"
        )
    return ""


def is_building() -> bool:
    """Return whether a build for this torch and Python runs in the background now."""
    return attempts.is_building(_folder())


def _folder() -> Path:
    return cache.cache_directory().absolute() / cache.folder_of(cache.identity())


def _start(lock: int) -> None:
    environ = helper_process.environment(launchers.without_rank(os.environ))
    helper_process.start(
        "commlens.launch.background_build",
        str(lock),
        str(os.getpid()),
        str(job_dirs.start_ticks(os.getpid())),
        environ={**environ, "PYTHONPATH": helper_process.python_path()},
        pass_fds=(lock,),
        is_silent=True,
    )


# --- the process that builds


class _EndedEarlyError(BaseException):
    """Raised in the main thread, so that a build that has to end leaves no files. Not an Exception:
    nothing on the way may catch it.
    """


def run(lock: int, launcher: int, start_ticks: int) -> None:
    """Build, in a process of its own that leads its session."""
    _take_only_idle_time()
    # held by this process alone, not by a compiler that outlives it
    fcntl.fcntl(lock, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        # imports torch, whose C++ ends a process in which a signal's handler raises meanwhile
        cache.identity()
        with _ending_early(launcher, start_ticks):
            build.build()
    except _EndedEarlyError:
        pass
    except Exception as error:
        with contextlib.suppress(Exception):
            attempts.remember_failure(
                _folder(), build.find_compiler(os.environ), str(error) or type(error).__name__
            )


def _take_only_idle_time() -> None:
    """Take the lowest priority for processor time and, which follows from SCHED_IDLE, for the disk.
    Where the kernel ends a process for want of memory, this one comes first.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError):
        # where the kernel shares processor time among sessions first
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


@contextlib.contextmanager
def _ending_early(launcher: int, start_ticks: int) -> Iterator[None]:
    """Look each second whether the build has to end, and end its compiler then."""
    began = time.monotonic()
    job_ended: float | None = None

    def end() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, lambda *_: None)
        # the compiler and its parts, which remove their temporary files
        os.killpg(0, signal.SIGTERM)
        raise _EndedEarlyError

    def look(*_: Any) -> None:
        nonlocal job_ended
        now = time.monotonic()
        if job_ended is None and job_dirs.process_has_ended(launcher, start_ticks):
            job_ended = now
        free = cgroup.free_memory()
        if (
            (job_ended is not None and now - job_ended > AFTER_JOB_S)
            or now - began > LIMIT_S
            or (free is not None and free < FREE_TO_GO_ON)
        ):
            end()

    signal.signal(signal.SIGTERM, lambda *_: end())
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    run(*map(int, sys.argv[1:4]))
