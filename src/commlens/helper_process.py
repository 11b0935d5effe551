"""Start a Python process of commlens's own beside the job. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_START_S = 10.0


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is not recorded, and in which torch loads nothing of
    commlens.
    """
    others = {name: value for name, value in environ.items() if name != "COMMLENS"}
    return {**others, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def python_path() -> str:
    """Return ``PYTHONPATH`` for any working directory, on which a process finds this commlens."""
    places = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(os.path.join(folder(), place) for place in places if place)  # noqa: PTH118 - keeps absolute ones


def folder() -> str:
    """Return the working directory; "/" if it has been removed: Python does not start there."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return "/"


def start(
    module: str,
    *arguments: str,
    environ: Mapping[str, str],
    cwd: str | Path | None = None,
    pass_fds: Sequence[int] = (),
    is_silent: bool = False,
) -> int:
    """Run ``python -m module`` in a session of its own, with no input and no output.

    It is no child of this process: a program that waits for its children must not meet one of ours.

    Args:
        module: the module.
        arguments: its arguments.
        environ: all of its environment.
        cwd: its working directory; this one by default.
        pass_fds: file descriptors that stay open in it.
        is_silent: it has no standard error, either; else this process's.

    Returns:
        Its pid.

    Raises:
        OSError, subprocess.SubprocessError: it could not be started.
    """
    shell = subprocess.run(
        [
            "/bin/sh",
            "-c",
            '"$@" >/dev/null & echo $!',
            "sh",
            sys.executable,
            "-m",
            module,
            *arguments,
        ],
        env=environ,
        cwd=cwd or folder(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if is_silent else None,
        pass_fds=pass_fds,
        start_new_session=True,
        timeout=_START_S,
        check=True,
    )
    return int(shell.stdout)
