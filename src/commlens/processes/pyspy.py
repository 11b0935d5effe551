"""Python stacks read from outside with py-spy, for a process whose watchdog thread cannot record
them.

``--nonblocking`` reads the memory without pausing the process: a stuck process does not move
anyway, and a running one must not be disturbed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from commlens.model.collective import Frame, FrameKind, Stack
from commlens.model.ranklog import ThreadStack
from commlens.processes import process

TIMEOUT_S: Final = 5.0
_FRAMES_MAX: Final = 200
NO_CAPABILITY: Final = (
    "the capability SYS_PTRACE is missing: start the container with `--cap-add SYS_PTRACE`, or look"
    " from the host as root"
)

Classify = Callable[[str], FrameKind]


def find() -> str | None:
    """Return the path of py-spy: next to this Python, otherwise on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


class SeenFrame(NamedTuple):
    """A frame as py-spy shows it."""

    frame: Frame
    values: dict[str, str]  # local variables: Python's literals, else "<Type at 0x...>"
    addresses: dict[str, int]

    @property
    def name(self) -> str:
        """The function's name without its class."""
        return self.frame.function.rpartition(".")[2]


class SeenThread(NamedTuple):
    """A thread as py-spy shows it."""

    stack: ThreadStack
    seen: list[SeenFrame]
    owns_gil: bool


class Stacks(NamedTuple):
    """py-spy's answer for one process: its threads, the main one first."""

    threads: list[SeenThread]
    note: str | None  # why there are none


def ptrace_scope() -> str:
    """Return the kernel's setting of who may read other processes; "" if it has none."""
    return (process.read_text("/proc/sys/kernel/yama/ptrace_scope") or "").strip()


def why_refused(pid: int, stderr: str) -> str:
    """Return what kept py-spy from reading a process, by its error message, in a clause; if it may
    not, the clause names the setting or the capability.
    """
    if "ermission" not in stderr:
        text = " ".join(line.strip() for line in stderr.splitlines() if line.strip())
        return f"py-spy failed: {text[:200] or 'no reason given'}"
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return "the process has ended"
    if owner != os.geteuid() and os.geteuid() != 0:
        return "its processes belong to another user, and only that user or root may read them"
    scope = ptrace_scope()
    if scope in ("1", "2"):
        return (
            f"kernel.yama.ptrace_scope is {scope}, which lets only root read other processes: run"
            f" `sudo commlens attach {pid}`, or `sudo sysctl kernel.yama.ptrace_scope=0`"
        )
    if scope == "3":
        return (
            "kernel.yama.ptrace_scope is 3, which forbids it to everybody until the machine is"
            " restarted"
        )
    return NO_CAPABILITY


def take(
    pid: int,
    classify: Classify,
    *options: str,
    timeout_s: float = TIMEOUT_S,
) -> Stacks:
    """Read the stacks of all threads of a process.

    Args:
        pid: the process.
        classify: returns the kind of code in a file.
        options: of ``py-spy dump``, by default ``--nonblocking``.
        timeout_s: when to kill py-spy.
    """
    program = find()
    if program is None:
        return Stacks([], "py-spy is not installed: `pip install py-spy`")
    command = [program, "dump", "--json", "--full-filenames", "--pid", str(pid)]
    command += options or ("--nonblocking",)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Stacks([], f"py-spy did not answer within {timeout_s:.0f} s")
    except OSError as error:
        return Stacks([], f"py-spy could not be started: {error}")
    if done.returncode:
        return Stacks([], why_refused(pid, done.stderr.decode("utf-8", "replace")))
    try:
        return parse(json.loads(done.stdout), pid, classify, time.time_ns())
    except (ValueError, KeyError, TypeError, AttributeError):
        return Stacks([], "py-spy printed something that is not its JSON")


def parse(answer: Any, pid: int, classify: Classify, taken_ns: int) -> Stacks:
    """Convert py-spy's JSON: a list of threads, each with its frames, innermost first."""
    threads: list[SeenThread] = []
    knows_main = any(thread.get("os_thread_id") == pid for thread in answer)
    for thread in answer:
        native = int(thread.get("os_thread_id") or 0)
        name = thread.get("thread_name") or ("MainThread" if native == pid else "")
        seen = [_seen_frame(frame, classify) for frame in thread["frames"][:_FRAMES_MAX]]
        stack = ThreadStack(
            thread=native,
            name=name,
            frames=tuple(one.frame for one in seen),
            taken_ns=taken_ns,
            # a program may give any thread this name
            is_main=native == pid if knows_main else name == "MainThread" or len(answer) == 1,
        )
        threads.append(SeenThread(stack, seen, bool(thread.get("owns_gil"))))
    threads.sort(key=lambda one: not one.stack.is_main)
    return Stacks(threads, None if threads else "py-spy found no Python thread")


def _seen_frame(frame: Mapping[str, Any], classify: Classify) -> SeenFrame:
    file, variables = frame.get("filename") or "?", frame.get("locals") or []
    return SeenFrame(
        Frame(file, int(frame.get("line") or 0), frame.get("name") or "?", classify(file)),
        {str(one.get("name")): str(one.get("repr") or "") for one in variables},
        {str(one.get("name")): int(one.get("addr") or 0) for one in variables},
    )


# --- where a process spends its time

PROFILE_S: Final = 2
_RATE: Final = 50  # samples a second
# under Python 3.10, py-spy knows a thread by its address, and the main one by its name
_LINE = re.compile(r"thread \((\d+|0x[0-9A-F]+)\)(?:: ([^;]*))?;(.*) (\d+)")
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")

Profile = Counter[Stack]
"""Number of samples by stack, innermost frame first."""


def take_profile(pid: int, classify: Classify, *, duration_s: int = PROFILE_S) -> Profile:
    """Sample the main thread of a process. The result is empty if py-spy is not installed or may
    not read it.
    """
    program = find()
    if program is None:
        return Counter()
    command = [
        program,
        "record",
        "--duration",
        str(duration_s),
        "--rate",
        str(_RATE),
        "--nonblocking",
        "--idle",
        "--threads",
        "--full-filenames",
        "--format",
        "raw",
        "--output",
        "/dev/stdout",
        "--pid",
        str(pid),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=duration_s + 10.0,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Counter()
    return parse_profile(done.stdout.decode("utf-8", "replace"), pid, classify)


def parse_profile(text: str, pid: int, classify: Classify) -> Profile:
    """Convert py-spy's raw format: a line per stack, outermost frame first, and the number of
    samples.
    """
    found: Profile = Counter()
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        # the main thread's id is the process's
        is_main = match is not None and (
            match[2] == "MainThread" if match[1].startswith("0x") else int(match[1]) == pid
        )
        if match is None or not is_main:
            continue
        frames = (_FRAME.fullmatch(part) for part in reversed(match[3].split(";")))
        stack = tuple(
            Frame(
                file=frame[2],
                line=int(frame[3]),
                function=frame[1].rpartition(".")[2],
                kind=classify(frame[2]),
            )
            for frame in frames
            if frame is not None
        )
        found[stack] += int(match[4])
    return found


# --- in threads

_Result = TypeVar("_Result")


class InBackground(Generic[_Result]):
    """One look at processes, by py-spy or otherwise, in a thread: the watcher need not wait for it.

    Args:
        run: looks, and returns its result.
        failed: returns the result in its place if it raises an exception.
    """

    def __init__(self, run: Callable[[], _Result], failed: Callable[[Exception], _Result]) -> None:
        self.started_at = time.monotonic()
        self._result: _Result | None = None
        self._run, self._failed = run, failed
        self._thread = threading.Thread(target=self._take, name="commlens-background", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        try:
            self._result = self._run()
        except Exception as error:
            self._result = self._failed(error)

    def wait(self, timeout_s: float = 0.0) -> _Result | None:
        """Return the result; None if there is none yet."""
        self._thread.join(max(0.0, timeout_s))
        return self._result
