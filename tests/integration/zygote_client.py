"""Starts and talks to ``zygote.py``, a process that has imported torch and forks ranks on request."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_python import ForkedPopen

HERE = Path(__file__).parent
FRESH = "TEST_WITHOUT_FORKS"
"""Set by ``make test-all``: commands that could be forks are Pythons of their own."""


def has_ended(pid: int) -> bool:
    """Whether the process is a zombie with all its threads, or gone. Only a pidfd tells: in /proc
    the first thread is one before that.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


class Zygote:
    """The process that forks ranks."""

    def __init__(self) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("COMMLENS", "TORCH_", "OMP_"))
        }
        environment.update(
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
            PYTHONUNBUFFERED="1",
            TORCHINDUCTOR_COMPILE_THREADS="1",
            KINETO_LOG_LEVEL="6",  # of the profiler, which says at level 5 when it starts and stops
        )
        self._forks, served = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(served.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=HERE,
            bufsize=0,
            start_new_session=True,
            pass_fds=[served.fileno()],
        )
        served.close()
        ready = self._answer(60.0)
        assert ready["threads"] == 1, (
            f"The zygote has {ready['threads']} threads: forking it is not safe."
        )

    def _answer(self, timeout_s: float) -> dict:
        assert self.process.stdout is not None
        line = b""
        deadline = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            readable, _, _ = select.select(
                [self.process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            chunk = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            if not chunk:
                raise RuntimeError(
                    f"The zygote gave no answer within {timeout_s:.0f} s (exit status"
                    f" {self.process.poll()})."
                )
            line += chunk
        return json.loads(line)

    def ask(self, **request: object) -> dict:
        """One request, one answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return self._answer(20.0)

    def reap(self, pids: list[int]) -> dict[int, int]:
        """The wait statuses of processes that have ended or are about to: within 10 s."""
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + 10
        while len(statuses) < len(pids) and time.monotonic() < deadline:
            answer = self.ask(do="reap", pids=[pid for pid in pids if pid not in statuses])
            statuses.update({int(pid): status for pid, status in answer["ended"].items()})
            if len(statuses) < len(pids):
                time.sleep(0.02)
        assert len(statuses) == len(pids), f"Processes {set(pids) - set(statuses)} cannot be ended."
        return statuses

    def run(
        self,
        *arguments: str,
        folder: Path,
        timeout_s: float,
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """Run a script, or ``-m`` and a module, in a fork. Return what it printed, which is in a
        file of ``folder``; after ``timeout_s``, the fork and what it forked are killed.
        """
        [pid] = self.ask(
            do="start",
            folder=str(folder),
            store=False,
            ranks=[{"environment": dict(environ or {}), "arguments": list(arguments)}],
        )["pids"]
        deadline = time.monotonic() + timeout_s
        while not has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        is_late = not has_ended(pid)
        if is_late:
            os.killpg(pid, signal.SIGKILL)
        self.reap([pid])
        printed = (folder / "rank0.out").read_text(errors="replace")
        return f"not done within {timeout_s:.0f} s\n{printed}" if is_late else printed

    def popen(
        self, command: Sequence[str], *, enters: tuple[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Do what ``subprocess.Popen`` does. Where the command is a Python with a script or a
        module, it is a fork: neither it nor any Python that it starts pays for the import of torch.
        In ``make test-all``, it is a Python of its own all the same.

        Args:
            command: the command.
            enters: a network namespace of ``ip netns`` and a host name that it has to itself.
            options: those of ``subprocess.Popen``.
        """
        made = ForkedPopen.__new__(ForkedPopen)
        made.asks, made.enters = None if FRESH in os.environ else self._forks, enters
        made.__init__(list(command), **options)  # type: ignore[misc]
        return made

    def call(
        self, command: Sequence[str], *, timeout_s: float, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Do what ``subprocess.run`` does, with the output as text, in such a fork."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(command, **{**pipes, **options}) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def close(self) -> None:
        """End it."""
        self._forks.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        self.process.stdout.close()
