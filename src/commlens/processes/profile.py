"""Where the main thread of a running process spends its time: py-spy samples its stack from
outside, without pausing it.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from commlens.model.collective import Frame, Stack
from commlens.processes import pyspy
from commlens.processes.pyspy import Classify

PROFILE_S: Final = 2
_RATE: Final = 50  # samples a second
_LINE = re.compile(r"thread \((\d+)\)[^;]*;(.*) (\d+)")
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")

Profile = Counter[Stack]
"""Number of samples by stack, innermost frame first."""


def take(pid: int, classify: Classify, *, duration_s: int = PROFILE_S) -> Profile:
    """Sample the main thread of a process. The result is empty if py-spy is not installed or may
    not read it.
    """
    program = pyspy.find()
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
    return parse(done.stdout.decode("utf-8", "replace"), pid, classify)


def parse(text: str, pid: int, classify: Classify) -> Profile:
    """Convert py-spy's raw format: a line per stack, outermost frame first, and the number of
    samples.
    """
    found: Profile = Counter()
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or int(match[1]) != pid:  # the main thread's id is the process's
            continue
        frames = (_FRAME.fullmatch(part) for part in reversed(match[2].split(";")))
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
        found[stack] += int(match[3])
    return found


class Profiling:
    """Profiles of several processes, taken at the same time in threads, so that the watcher does
    not wait for them.
    """

    def __init__(self, pids: Mapping[int, int], classify: Classify) -> None:
        """Begin.

        Args:
            pids: rank to pid.
            classify: returns the kind of code in a file.
        """
        self.profiles: dict[int, Profile] = {}  # by rank
        self._threads = [
            threading.Thread(
                target=self._take, args=(rank, pid, classify), name="commlens-profile", daemon=True
            )
            for rank, pid in pids.items()
        ]
        for thread in self._threads:
            thread.start()

    def _take(self, rank: int, pid: int, classify: Classify) -> None:
        try:
            self.profiles[rank] = take(pid, classify)
        except Exception:  # the verdict comes without it
            self.profiles[rank] = Counter()

    @property
    def is_done(self) -> bool:
        """Whether all have been taken."""
        return not any(thread.is_alive() for thread in self._threads)
