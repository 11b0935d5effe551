"""Switch recording and verification on and off, and dump: ``commlens.enable``, ``disable``,
``verify``, ``expect_slow`` and ``dump``.

This module connects the recorder with the verifier and with dumping, which do not import each
other. Importing it does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlens import config, launchers
from commlens.capture import session
from commlens.capture.init_hooks import safely
from commlens.capture.session import expect_slow
from commlens.errors import CommandError, ConfigError, require_torch
from commlens.launch import torch_recorder
from commlens.launch.new_warnings import new_warnings
from commlens.native import nccl_profiler
from commlens.numbers import job_folder

if TYPE_CHECKING:
    from commlens.tracing.in_flight.watch import BufferWatch
    from commlens.verification.verifier import Verifier

__all__ = [
    "disable",
    "dump",
    "enable",
    "expect_slow",
    "start",
    "start_from_environment",
    "verify",
    "world",
]

log = logging.getLogger("commlens")
_buffers: BufferWatch | None = None


def enable(*, verify: bool | str | None = None, **settings: Any) -> None:
    """Record this process's collectives from its first ``init_process_group`` on (at once if that
    has already run).

    This does in one line of code what ``commlens launch`` does. If ``COMMLENS=1`` has already
    switched recording on, the settings apply as long as nothing is recorded yet; after that, only
    verification can still be switched on.

    Args:
        verify: verify every collective before it is issued, as ``commlens launch --debug`` does, or
            with ``"sample"`` a part of them; another name for ``debug``. All ranks must do this at
            the same point of the program. If a group exists already, they wait there for each
            other, for up to 10 s.
        settings: any of :class:`commlens.config.Settings`, for example ``stall_timeout=30``.

    Raises:
        ConfigError: a setting is unknown or has a bad value.
        MissingDependency: torch is not installed.
    """
    require_torch("commlens.enable()")
    if verify is not None and settings.setdefault("debug", verify) != verify:
        raise ConfigError(
            "commlens.enable got both verify and debug, which are two names for one setting: give"
            " one of them."
        )
    start(
        config.load_settings(
            overrides=settings, overrides_from="argument of commlens.enable", strict=True
        ).settings
    )


def disable() -> None:
    """Stop recording in this process and close the black box as after a clean end."""
    global _buffers
    session.stop()
    if _buffers is not None:
        safely(_buffers.stop)
        _buffers = None


def world(name: str) -> None:
    """Call this program by a name where it shares groups with other programs, as trainers and
    rollout workers do: verdicts then say ``trainer 0`` in place of ``rank 0``. Processes that this
    one starts have the name, too, unless they give themselves another.

    Args:
        name: the same on all ranks of the program, and no other program's.

    Raises:
        ConfigError: the name has other characters than letters, digits, dots, dashes and
            underscores.
    """
    name = config.accepted("world", name, "argument of commlens.world")
    os.environ[config.variable_of("world")] = name
    if (current := session.recording()) is not None:
        safely(current.name_world, name)


@contextlib.contextmanager
def verify() -> Iterator[None]:
    """Verify every collective inside, whatever the setting outside; leaving restores it.

    Use it as ``with commlens.verify(): ...`` or as a decorator, ``@commlens.verify()``. All ranks
    must enter at the same point of the program: they wait there for each other, for up to 10 s. The
    log names a rank that does not arrive, and the collectives inside are compared among the ranks
    that have entered. If nothing is recorded yet, recording starts, and continues afterwards.

    Raises:
        DistributedOperationException: inside, at a collective that would go wrong.
        MissingDependency: torch is not installed.
    """
    require_torch("commlens.verify()")
    if not session.is_started():
        start_from_environment()
    session.enter_verification()
    try:
        yield
    finally:
        session.leave_verification()


def dump(
    directory: str | Path,
    *,
    job_dir: Path | None = None,
    window_s: float = 0.5,
    keep: int | None = None,
    mode: int | None = None,
) -> Path:
    """Copy a job's black boxes, and what is observed of its processes, into a folder below
    ``directory``.

    Args:
        directory: the job's folder is created in it.
        job_dir: of the job's black boxes; by default those of the job that this process is a rank
            of.
        window_s: how long to observe the processes.
        keep: how many jobs' dumps to keep there; by default the setting keep_dumps.
        mode: permissions of the files; by default the setting dump_mode.

    Returns:
        The dump's folder.

    Raises:
        CommandError: this process is not a recorded rank.
        DumpError: nothing could be saved, or a file could not be written.
    """
    from commlens.watch import snapshot

    current = session.recording() if session.is_started() else None
    job_dir = job_dir or (current.job_dir if current is not None else None)
    if job_dir is None:
        raise CommandError(
            "This process is not recorded, so there is nothing to dump: start it with `commlens"
            " run`, or call commlens.enable() first."
        )
    settings = (
        current.settings if current is not None else config.load_settings(strict=False).settings
    )
    return snapshot.dump(
        directory,
        job_dir,
        window_s=window_s,
        keep=settings.keep_dumps if keep is None else keep,
        mode=int(settings.dump_mode, 8) if mode is None else mode,
    )


def start_from_environment() -> None:
    """Record with the settings in force here, as the autoload entry point does. Bad settings are
    logged and replaced by defaults.
    """
    resolved = config.load_settings(strict=False)
    for warning in new_warnings(resolved.warnings):
        log.warning("commlens: %s", warning)
    start(resolved.settings)


def start(settings: config.Settings) -> None:
    """Record with these settings; :func:`commlens.capture.session.start` has the details."""
    if (
        not session.is_started()
        and (alone := lone_worker(os.environ)) is not None
        and _is_child_of(b"accelerate")
    ):
        log.warning("commlens: %s", alone)
    if settings.box_entries:
        torch_recorder.switch_on_here(timing=settings.timing)
    if settings.nccl_profiler != "off" and (reason := nccl_profiler.why_not(os.environ)):
        for warning in new_warnings([f"NCCL itself tells nothing, because {reason}."]):
            log.warning("commlens: %s", warning)
    session.start(settings, make_verifier=_make_verifier, dump=_dump)
    job_folder.set_finder(_job_folder)
    if settings.check_numbers:
        safely(_check_numbers, settings.check_numbers)


def _job_folder() -> Path | None:
    current = session.recording()
    return current.job_dir if current is not None and current.is_open else None


def _check_numbers(how: str) -> None:
    import torch.distributed as dist

    if dist.is_available():
        from commlens.model.number_checks import parse_number_checks
        from commlens.numbers import sampling

        sampling.start(parse_number_checks(how))
        if (current := session.recording()) is not None:
            current.before_end = sampling.end


def lone_worker(environ: Mapping[str, str]) -> str | None:
    """Return a warning if Accelerate was to start several processes and started only this one.

    ``accelerate launch --cpu --num_processes 2`` does that without mpirun (Accelerate 1.15).
    """
    # Slurm's variables are those of a batch script, too, which is one process.
    ranks = {*launchers.RANK, *launchers.WORLD_SIZE, *launchers.LOCAL_RANK}
    ranks = {name for name in ranks if not name.startswith("SLURM_")}
    if (
        "ACCELERATE_MIXED_PRECISION" not in environ
        or "MASTER_PORT" not in environ
        or ranks & environ.keys()
    ):
        return None
    return (
        "Accelerate was asked to start several processes but started only this one, as it does on a"
        " CPU without mpirun. `commlens launch --nproc-per-node N script.py` starts N of them; so"
        " does `accelerate launch --multi_gpu --num_processes N` with ACCELERATE_USE_CPU=true."
    )


def _is_child_of(program: bytes) -> bool:
    with contextlib.suppress(OSError):
        return program in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return False


def _make_verifier(job_dir: Path, rank: int, **options: Any) -> Verifier:
    from commlens.verification.accelerate import replace_check
    from commlens.verification.verifier import Verifier

    verifier = Verifier(job_dir, rank, **options)
    replace_check()
    current = session.recording()
    if current is not None and current.settings.debug is True:
        safely(_watch_buffers, current.recorder)
    return verifier


def _watch_buffers(recorder: Any) -> None:
    global _buffers
    from commlens.tracing.in_flight.watch import BufferWatch

    if _buffers is None:
        _buffers = BufferWatch()
        _buffers.start()
    recorder.hazards.of_buffers = _buffers.hazards


def _dump(directory: str, job_dir: Path, settings: config.Settings) -> Path:
    from commlens.watch import snapshot

    return snapshot.dump(
        directory, job_dir, keep=settings.keep_dumps, mode=int(settings.dump_mode, 8)
    )
