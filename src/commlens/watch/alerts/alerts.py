"""Passes each verdict on to other systems: to a command or a Python function.

All of it happens in threads of the watcher and in processes of its own, so that neither the job nor
the watcher waits for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import msgspec

from commlens.config import SWITCH, Settings
from commlens.model.verdict import Verdict
from commlens.text import exit_phrase

TIMEOUT_S: Final = 30.0
"""A command that takes longer is killed."""

# "package.module:function"; any other text is a command for the shell
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# a program that calls that function with the alert, which it reads from its standard input
_CALL: Final = (
    "import functools, importlib, json, sys; module, _, name = sys.argv[1].partition(':');"
    " functools.reduce(getattr, name.split('.'),"
    " importlib.import_module(module))(json.load(sys.stdin))"
)


class Alert(msgspec.Struct, frozen=True):
    """A verdict with its circumstances: the standard input of ``on_verdict``."""

    time: str  # ISO 8601, UTC
    job: str
    host: str
    dump: str  # folder of the dump; empty if none was saved
    verdict: Verdict
    schema: str = "commlens.alert/1"


class Alerts:
    """Passes verdicts on as the setting ``on_verdict`` says.

    Args:
        settings: of the watcher.
        host: the name of this node.
        say: prints a line. Each failure is printed once.
    """

    def __init__(self, settings: Settings, host: str, say: Callable[[str], Any]) -> None:
        self._command = settings.on_verdict or ""
        self._host = host
        self._say = say
        self._folder: Path | None = None
        with contextlib.suppress(OSError):
            self._folder = Path.cwd()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []  # that run
        self._printed: set[str] = set()

    def send(self, verdict: Verdict, *, job: str, dump: Path | None) -> None:
        """Pass a verdict on. Returns at once; errors are printed, never raised."""
        if not self._command:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        alert = msgspec.json.encode(
            Alert(
                time=now,
                job=job,
                host=self._host,
                dump=str(dump.absolute()) if dump else "",
                verdict=verdict,
            )
        )
        thread = threading.Thread(
            target=self._pass_on, args=(alert,), name="commlens-alert", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def close(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds until all commands have ended, then end them."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for process in list(self._processes):
            self._tell(
                f"on_verdict was ended: the job is over, and it still ran {timeout_s:.0f} s later."
            )
            _kill(process)

    def _pass_on(self, alert: bytes) -> None:
        try:
            # A line, so that `cat >> FILE` makes a file of JSON lines.
            self._run(alert + b"\n")
        except Exception as error:
            self._tell(f"the verdict was not passed on: {type(error).__name__}: {error}")

    def _run(self, alert: bytes) -> None:
        command: list[str] = ["/bin/sh", "-c", self._command]
        if _FUNCTION.fullmatch(self._command):
            command = [sys.executable, "-c", _CALL, self._command]
        environ = {**os.environ, SWITCH: "0"}  # a command that uses torch is no rank
        # not a pipe, which a program left in the background would keep open
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd=self._folder,
                    env=environ,
                    start_new_session=True,
                )
            except OSError as error:
                self._tell(f"on_verdict could not be started: {error.strerror or error}")
                return
            self._processes.append(process)
            try:
                process.communicate(alert, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._tell(f"on_verdict did not end within {TIMEOUT_S:.0f} s and was killed.")
                return
            finally:
                self._processes.remove(process)
                _kill(process)  # a command that has ended may have left others in the background
            if process.returncode:
                errors.seek(0)
                last = (
                    errors.read(10_000).decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
                )
                how = exit_phrase(process.returncode)
                self._tell(f"on_verdict {how}" + (f": {last}" if last else "."))

    def _tell(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self._say(line)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command with what it left in the background."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
