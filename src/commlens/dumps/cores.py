"""Python stacks from core files, by pystack: of a rank that crashed, or of ``gcore``.

pystack reads in a process of its own (this module as a program), since a damaged core file may
crash it.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from commlens.dumps.sources import Source
from commlens.errors import FormatError
from commlens.helper_process import python_path
from commlens.model.collective import Frame
from commlens.model.frames import frame_kind
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack
from commlens.text import printable

_TIMEOUT_S: Final = 120.0
_FRAMES_MAX: Final = 200
_FATAL: Final = {
    int(each): each.name
    for each in (
        *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
        *(signal.SIGILL, signal.SIGSYS, signal.SIGQUIT),
    )
}
"""Signals after which the kernel writes a core file; that of ``gcore`` is of a living process."""
_SEARCHED: Final = 256 << 20  # bytes
_RANK: Final = re.compile(rb"\0RANK=(\d{1,7})\0")


class Core(NamedTuple):
    """What a core file tells of its process."""

    pid: int
    rank: int  # by its environment; -1: unknown
    stacks: list[ThreadStack]
    signal: str = ""  # that killed the process; empty: it did not end, or that is unknown


def read_core(source: Source) -> Core:
    """Read a core file.

    Raises:
        FormatError: it cannot be read.
    """
    path, name = source.plain_path, source.name
    if path is None:
        raise FormatError(f"{name} is a core file, which can be read only unpacked and from disk.")
    if find_spec("pystack") is None:
        raise FormatError(
            f"{name} is a core file: pystack, which reads its stacks, is not installed (pip install"
            " pystack)."
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(path.absolute())],
            cwd="/",  # no file in the working directory is taken for a module
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise FormatError(f"pystack did not read {name} within {_TIMEOUT_S:.0f} s.") from None
    except ValueError:
        raise FormatError(f"{name} is a core file that pystack could not read.") from None
    if "error" in found:
        raise FormatError(f"pystack could not read {name}: {printable(found['error'])}.")
    stacks = [_stack_of(each, found["pid"], source.modified_ns) for each in found["threads"]]
    return Core(found["pid"], _rank_in(path), stacks, _FATAL.get(found["signal"], ""))


def _stack_of(thread: Sequence[Any], pid: int, taken_ns: int) -> ThreadStack:
    number, name, frames = thread
    stack = tuple(
        Frame(printable(file), line, printable(function), frame_kind(file, []))
        for file, line, function in frames
    )
    return ThreadStack(number, printable(name), stack, taken_ns, is_main=number == pid)


def _rank_in(path: Path) -> int:
    """Return the rank in the environment that a process started with: it lies at the end of its
    stack, and the stack at the end of the core file, of which only the last part is read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        at = content.rfind(b"\0RANK=", max(0, len(content) - _SEARCHED))
        found = _RANK.match(content[at : at + 16]) if at >= 0 else None
    return int(found[1]) if found is not None else -1


def add_cores(
    logs: Sequence[RankLog], cores: Iterable[tuple[str, Core]], problems: list[str]
) -> dict[int, Observation]:
    """Add the stacks of core files to the logs of their processes.

    Args:
        logs: of one job.
        cores: what was read, by the file's name.
        problems: extended by sentences about core files of which the process is not known.

    Returns:
        By rank, the stacks of processes that have no log.
    """
    others: dict[int, Observation] = {}
    for name, core in cores:
        found = [log for log in logs if log.pid == core.pid and core.rank in (-1, log.rank)]
        if len(found) == 1:
            _join(found[0].observation, core)
        elif not found and core.rank >= 0:
            # processes that a rank started have its environment, too
            if core.rank in others:
                core = core._replace(stacks=[], signal="")
                problems.append(
                    f"{name} and another core file are of processes with rank {core.rank}: their"
                    " stacks are left out."
                )
            others[core.rank] = _join(Observation(), core)
        else:
            problems.append(
                f"{name} is left out: nothing tells of which rank its process {core.pid} was."
            )
    return others


def _join(seen: Observation, core: Core) -> Observation:
    seen.stacks, seen.stacks_note = core.stacks, None
    if core.signal and not seen.has_ended:
        seen.end, seen.signal = End.KILLED, core.signal
    return seen


def _print_stacks(path: str) -> None:
    """Print the process and the stacks of a core file as JSON, innermost frames first."""
    from pystack.engine import CoreFileAnalyzer, get_process_threads_for_core

    try:
        core = CoreFileAnalyzer(path)
        threads = [
            (
                thread.tid,
                thread.name or "",
                [
                    (frame.code.filename, frame.code.location.lineno, frame.code.scope)
                    for frame in thread.frames
                ][: -_FRAMES_MAX - 1 : -1],
            )
            for thread in get_process_threads_for_core(path, core.extract_executable())
        ]
        found = {
            "pid": core.extract_ps_info()["pid"],
            "signal": core.extract_failure_info().get("si_signo", 0),
            "threads": threads,
        }
        print(json.dumps(found))
    except Exception as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    _print_stacks(sys.argv[1])
