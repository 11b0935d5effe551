"""Builds that nobody asked for, as files in the cache: the lock of the build that runs now, and why
the last one failed.

    <cache>/<identity>/.background.lock   locked while a process builds in the background
    <cache>/<identity>/.background.json   the reason and the time of a failure, and the compiler

Both belong to one identity (:func:`commlens.native.cache.identity`). A failure is forgotten after a
day, when another compiler is installed, and when a build succeeds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs

LOCK: Final = ".background.lock"
FAILURE: Final = ".background.json"
KEEP_S: Final = 86_400.0
"""How long a failure keeps other launches from trying: a full disk is emptied, a package is
installed.
"""


@dataclass(frozen=True)
class Failure:
    """A build in the background that failed."""

    reason: str
    when: str  # "2025-01-31T23:59:59Z"


def take_lock(folder: Path) -> int | None:
    """Lock a folder for a build in the background. Return the open file, which a child may inherit;
    None if another process builds.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # a file system without locks: builds run side by side, and the last one stays
    return descriptor


def is_building(folder: Path) -> bool:
    """Return whether a process builds in the background. Creates nothing."""
    return bool(job_dirs.is_locked(folder / LOCK))


def remember_failure(folder: Path, compiler: list[str], reason: str) -> None:
    """Write down why a build failed. If that fails, too, the next launch tries again."""
    text = json.dumps({"compiler": _compiler_id(compiler), "reason": reason, "unix_s": time.time()})
    with contextlib.suppress(OSError):
        temporary = folder / f"{FAILURE}.{os.getpid()}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(folder / FAILURE)


def failure(folder: Path, compiler: list[str]) -> Failure | None:
    """Return the failure of the last day with this compiler."""
    try:
        about = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
        reason, unix_s, of_compiler = (
            str(about["reason"]),
            float(about["unix_s"]),
            about["compiler"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if of_compiler != _compiler_id(compiler) or not 0 <= time.time() - unix_s < KEEP_S:
        return None
    return Failure(reason, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s)))


def forget_failure(folder: Path) -> None:
    """Forget a failure, because a build succeeded."""
    with contextlib.suppress(OSError):
        (folder / FAILURE).unlink(missing_ok=True)


def _compiler_id(compiler: list[str]) -> Mapping[str, str]:
    """Return what changes when another compiler is installed, without running it."""
    path = shutil.which(compiler[0]) or compiler[0]
    try:
        changed = str(int(Path(path).resolve().stat().st_mtime))
    except OSError:
        changed = ""
    return {"command": shlex.join(compiler), "path": os.path.realpath(path), "changed": changed}
