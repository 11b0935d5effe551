"""Python stacks read from outside with py-spy, for a process whose watchdog thread cannot record
them.

``--nonblocking`` reads the memory without pausing the process: a stuck process does not move
anyway, and a running one must not be disturbed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import ThreadStack

TIMEOUT_S: Final = 5.0
_FRAMES_MAX: Final = 200
NO_JSON: Final = "py-spy printed something that is not its JSON"

Classify = Callable[[str], FrameKind]


def find() -> str | None:
    """Return the path of py-spy: next to this Python, otherwise on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


class Stacks(NamedTuple):
    """py-spy's answer for one process."""

    threads: list[ThreadStack]
    note: str | None  # why there are none


def dump(
    pid: int, *options: str, timeout_s: float, why_refused: Callable[[str], str]
) -> tuple[Any, str | None]:
    """Run ``py-spy dump``.

    Args:
        pid: the process.
        options: more than ``--json`` and whole file names.
        timeout_s: when to kill py-spy.
        why_refused: returns a clause about py-spy's error message.

    Returns:
        The threads as py-spy's JSON has them, or None and why there are none.
    """
    program = find()
    if program is None:
        return None, "py-spy is not installed: `pip install py-spy`"
    command = [program, "dump", "--json", "--full-filenames", "--pid", str(pid), *options]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"py-spy did not answer within {timeout_s:.0f} s"
    except OSError as error:
        return None, f"py-spy could not be started: {error}"
    if done.returncode:
        return None, why_refused(done.stderr.decode("utf-8", "replace"))
    try:
        return json.loads(done.stdout), None
    except ValueError:
        return None, NO_JSON


def take(pid: int, classify: Classify, *, timeout_s: float = TIMEOUT_S) -> Stacks:
    """Read the stacks of all threads of a process.

    Args:
        pid: the process.
        classify: returns the kind of code in a file.
        timeout_s: when to kill py-spy.
    """
    answer, note = dump(pid, "--nonblocking", timeout_s=timeout_s, why_refused=_reason)
    if answer is None:
        return Stacks([], note)
    try:
        return parse(answer, pid, classify, time.time_ns())
    except (ValueError, KeyError, TypeError, AttributeError):
        return Stacks([], NO_JSON)


def parse(answer: Any, pid: int, classify: Classify, taken_ns: int) -> Stacks:
    """Convert py-spy's JSON: a list of threads, each with its frames, innermost first."""
    threads: list[ThreadStack] = []
    for thread in answer:
        native = int(thread.get("os_thread_id") or 0)
        frames = tuple(
            Frame(
                file=frame.get("filename") or "?",
                line=int(frame.get("line") or 0),
                function=frame.get("name") or "?",
                kind=classify(frame.get("filename") or ""),
            )
            for frame in thread["frames"][:_FRAMES_MAX]
        )
        main = native == pid
        name = thread.get("thread_name") or ("MainThread" if main else "")
        threads.append(
            ThreadStack(thread=native, name=name, frames=frames, taken_ns=taken_ns, is_main=main)
        )
    threads.sort(key=lambda stack: not stack.is_main)
    return Stacks(threads, None if threads else "py-spy found no Python thread")


def failed(stderr: str) -> str:
    """Return py-spy's error message in a clause."""
    text = " ".join(line.strip() for line in stderr.splitlines() if line.strip())
    return f"py-spy failed: {text[:200] or 'no reason given'}"


def is_refusal(stderr: str) -> bool:
    """Return whether py-spy's error message says that it may not read the process."""
    return "ermission" in stderr


def _reason(stderr: str) -> str:
    if is_refusal(stderr):
        return (
            "py-spy may not read the process (it needs SYS_PTRACE in a container, or"
            " kernel.yama.ptrace_scope=0)"
        )
    return failed(stderr)


class Pending:
    """A run of py-spy in a thread of its own, so that the watcher does not wait for it."""

    def __init__(self, pid: int, classify: Classify) -> None:
        self.started_at = time.monotonic()
        self.result: Stacks | None = None
        self._thread = threading.Thread(
            target=self._run, args=(pid, classify), name="commlens-py-spy", daemon=True
        )
        self._thread.start()

    def _run(self, pid: int, classify: Classify) -> None:
        try:
            self.result = take(pid, classify)
        except Exception as error:
            self.result = Stacks([], f"py-spy failed: {error}")

    def wait(self, timeout_s: float) -> Stacks | None:
        """Return the answer; None if there is none yet."""
        self._thread.join(max(0.0, timeout_s))
        return self.result
