"""Start a Python process of commlens's own beside the job. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_START_S = 10.0


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that is not recorded, and in which torch does not load
    commlens.
    """
    others = {name: value for name, value in environ.items() if name != "COMMLENS"}
    return {**others, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def python_path() -> str:
    """Return a ``PYTHONPATH`` with which a process finds this commlens, from any working
    directory.
    """
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

    The new process is no child of this one: a program that waits for its children must not find one
    of ours among them.

    Args:
        module: the module.
        arguments: its arguments.
        environ: all of its environment.
        cwd: its working directory; this one by default.
        pass_fds: file descriptors that stay open in it.
        is_silent: discard its standard error; else it writes to this process's.

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
