"""The pytest process's side of :mod:`commlens.testing.observer`. Standard library only, and no
thread: tests may fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from commlens import config, helper_process
from commlens.blackbox import job_dirs
from commlens.errors import CommandError, MissingDependency

ANSWER_S: Final = 20.0
"""How long a failed test may wait for its verdict."""
PREFIX: Final = "commlens-pytest-"
_FORGOTTEN_AFTER_S: Final = 24 * 3600.0


class ObserverAnswer(NamedTuple):
    """The observer's words on the test that runs; empty if it found nothing."""

    summary: str
    text: str


class ObserverClient:
    """Makes the folder of the black boxes, starts the observer and asks it.

    If pytest itself is a rank (``torchrun -m pytest``), all ranks of a node share the folder, and
    local rank 0 observes.

    Raises:
        ConfigError: a setting is wrong.
        CommandError: there is no folder in memory, or recording is switched off by the settings.
        MissingDependency: msgspec is not installed.
    """

    running: ClassVar[ObserverClient | None] = None

    def __init__(self) -> None:
        settings = config.load_settings().settings
        if settings.box_entries == 0:
            raise CommandError("the setting box_entries is 0.")
        import importlib.util

        if importlib.util.find_spec("msgspec") is None:
            raise MissingDependency("it needs msgspec: pip install msgspec.")
        roots = job_dirs.box_roots(settings.box_dir)
        if not roots:
            raise CommandError(
                "there is no folder in memory for the black boxes; name one with COMMLENS_BOX_DIR."
            )
        is_rank = int(os.environ.get("WORLD_SIZE") or 1) > 1 and "LOCAL_RANK" in os.environ
        self._observes = not is_rank or os.environ["LOCAL_RANK"] == "0"
        _remove_forgotten(roots[0])
        if is_rank:
            self.box_dir = roots[0] / f"{PREFIX}{os.getuid()}-{job_dirs.job_identity(os.environ)}"
            self.box_dir.mkdir(mode=0o700, exist_ok=True)
        else:
            self.box_dir = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=roots[0]))
        self.variables = {
            config.SWITCH: "1",
            "COMMLENS_BOX_DIR": str(self.box_dir),
            "COMMLENS_WATCHED": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0
        self._pid = os.getpid()
        self._received = b""

    def start(self) -> None:
        """Start the observer."""
        if not self._observes:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "commlens.testing.observer", str(self.box_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=helper_process.environment(os.environ),
            start_new_session=True,
        )
        ObserverClient.running = self

    def begin(self, test: str) -> None:
        """Say that a test begins."""
        self._send({"begin": test})

    def end(self, test: str) -> None:
        """Say that a test has ended."""
        self._send({"end": test})

    def limit(self, test: str, seconds: float, method: str) -> None:
        """Say that pytest-timeout ends a test after so many seconds from now, by this method; 0:
        never.
        """
        self._send({"limit": test, "seconds": seconds, "method": method})

    def ask(self) -> ObserverAnswer | None:
        """Return what is known of the jobs of the test that runs; None if the observer does not run
        or answer.
        """
        answer = self._request("ask")
        return ObserverAnswer(answer["summary"], answer["text"]) if answer is not None else None

    @classmethod
    def look(cls) -> bool:
        """Have the test's jobs diagnosed, because their ranks are about to be ended. Return whether
        an observer runs and has a verdict on them for the report.
        """
        with contextlib.suppress(OSError):
            answer = cls.running._request("look") if cls.running is not None else None
            return bool(answer and answer["has_verdict"])
        return False

    def _request(self, what: str) -> dict[str, Any] | None:
        if self._process is None or os.getpid() != self._pid:
            return None
        self._asked += 1
        self._send({what: self._asked})
        until = time.monotonic() + ANSWER_S
        while (left := until - time.monotonic()) > 0:
            line = self._read_line(left)
            if line is None:
                return None
            answer: dict[str, Any] = json.loads(line)
            if answer["of"] == self._asked:
                return answer
        raise TimeoutError(f"no answer within {ANSWER_S:.0f} s")

    def _send(self, message: dict[str, object]) -> None:
        if self._process is not None and os.getpid() == self._pid:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read_line(self, timeout_s: float) -> bytes | None:
        assert self._process is not None and self._process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            ready = select.select(
                [self._process.stdout], [], [], max(0.0, until - time.monotonic())
            )[0]
            received = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not received:
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def close(self) -> None:
        """End the observer and remove the black boxes."""
        if os.getpid() != self._pid:
            return  # a forked child of a test
        process, self._process, ObserverClient.running = self._process, None, None
        if process is not None:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if self._observes:
            shutil.rmtree(self.box_dir, ignore_errors=True)


def _remove_forgotten(root: Path) -> None:
    """Free the shared memory of a pytest that was killed long ago."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if (
                time.time() - folder.stat().st_mtime > _FORGOTTEN_AFTER_S
                and folder.stat().st_uid == os.getuid()
            ):
                pid = int(folder.name.removeprefix(PREFIX).partition("-")[0])
                if job_dirs.start_ticks(pid) == 0:
                    shutil.rmtree(folder, ignore_errors=True)
