"""Programs that run beside a test and end with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PATIENCE_S = 120.0
"""Longest wait for what takes seconds, on a machine that is busy otherwise."""


def path_of(name: str) -> str | None:
    """Return a program's path; None if it is not installed. Debian keeps daemons in /usr/sbin."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def why_not(programs: Sequence[str], packages: str) -> str | None:
    """Return why programs cannot run here, in a sentence; None if all are installed."""
    missing = [name for name in programs if path_of(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} is not installed (Debian: apt install {packages})."


def wait_until(is_there: Callable[[], bool], name: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait until something is there, or fail."""
    until = time.monotonic() + timeout_s
    while not is_there():
        assert time.monotonic() < until, f"{name} is not there after {timeout_s:.0f} s."
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Daemons:
    """The programs that one test needs.

    Args:
        folder: holds what they print.
        environ: theirs.
    """

    def __init__(self, folder: Path, environ: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._environ = environ
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a program, with its output in a file of the folder."""
        path = path_of(name)
        assert path is not None
        with (self._folder / f"{Path(name).name}-{len(self._running)}.out").open("wb") as out:
            process = subprocess.Popen(
                [path, *options],
                env=self._environ,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self._running.append(process)
        return process

    def close(self) -> None:
        """End all of them."""
        for each in reversed(self._running):
            each.terminate()
        for each in self._running:
            try:
                each.wait(10)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
