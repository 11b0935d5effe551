"""Collect torch's own evidence about a running job: Flight Recorder dumps, which torch writes when
it receives a byte through a pipe, and the last errors in the ranks' log files.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from commlens.processes import process
from commlens.processes.ranks import RankProcess
from commlens.text import clean

_PIPE: Final = re.compile(r"^(TORCH_)?\w+_DEBUG_INFO_PIPE_FILE$")
_TARGETS: Final = (
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_XCCL_DEBUG_INFO_TEMP_FILE",
)
_WAIT_S: Final = 4.0
_DUMP_MAX: Final = 64 << 20
_LOG_TAIL: Final = 1 << 16  # bytes
_LINES_MAX: Final = 3
_LINE_MAX: Final = 240
_ERROR: Final = re.compile(
    r"Watchdog caught|Some NCCL operations have failed|NCCL WARN|Timed out waiting|timed"
    r" out|Timeout|^\w*Error: |CUDA error|Traceback"
)


class TorchDumps(NamedTuple):
    """The dumps of the ranks on this machine."""

    files: dict[str, bytes]  # by a name that ends with the rank
    notes: list[str]  # sentences about ranks that did not dump


def take_dumps(ranks: Sequence[RankProcess]) -> TorchDumps:
    """Make the ranks that have a pipe for it dump, and read the files."""
    began = time.time()
    files: dict[str, bytes] = {}
    waiting, unread = _trigger_dumps(ranks)
    while waiting and time.time() < began + _WAIT_S:
        for rank, paths in list(waiting.items()):
            content = next(filter(None, (_finished(path, began) for path in paths)), None)
            if content is not None:
                files[f"torch_dump_rank_{rank}"] = content
                del waiting[rank]
        time.sleep(0.1)
    notes = [
        f"Rank {rank}: torch's pipe for dumps has no reader; the NCCL backend of torch 2.15 opens"
        " none."
        for rank in unread
    ]
    notes += [
        f"Rank {rank}: torch did not dump within {_WAIT_S:.0f} s after it was asked to."
        for rank in waiting
    ]
    return TorchDumps(files, notes)


def _trigger_dumps(ranks: Sequence[RankProcess]) -> tuple[dict[int, list[Path]], list[int]]:
    """Write to the ranks' pipes for dumps.

    Returns:
        The files to which each rank may dump, and the ranks whose pipe no process reads.
    """
    triggered: dict[int, list[Path]] = {}
    unread: list[int] = []
    for one in ranks:
        environ = process.environment(one.pid)
        pipe = next((value for name, value in environ.items() if value and _PIPE.match(name)), "")
        if not pipe:
            continue
        if _write_byte(Path(f"/proc/{one.pid}/root{_absolute(pipe, one.pid)}{one.rank}.pipe")):
            triggered[one.rank] = [
                Path(f"/proc/{one.pid}/root{_absolute(target, one.pid)}{one.rank}")
                for target in targets(environ)
            ]
        else:
            unread.append(one.rank)
    return triggered, unread


def targets(environ: Mapping[str, str]) -> list[str]:
    """Return the prefixes of the files to which torch may dump, in order of precedence."""
    named = [environ[name] for name in _TARGETS if environ.get(name)]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return [*named, f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]


def _absolute(path: str, pid: int) -> str:
    if path.startswith("/"):
        return path
    try:
        return f"{Path(f'/proc/{pid}/cwd').readlink()}/{path}"
    except OSError:
        return f"/{path}"


def _write_byte(pipe: Path) -> bool:
    """Write a byte to a pipe. Returns False if no process reads it."""
    with contextlib.suppress(OSError):
        if pipe.is_fifo():
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - of the descriptor
                return file.write(b"1") == 1
    return False


def _finished(path: Path, after: float) -> bytes | None:
    """Return the content of a dump that was written after a time; None while it still grows."""
    try:
        before = path.stat()
        if before.st_mtime < after - 0.05 or not 0 < before.st_size <= _DUMP_MAX:
            return None
        time.sleep(0.1)
        content = path.read_bytes()
    except OSError:
        return None
    return content if len(content) == before.st_size else None


def error_lines(one: RankProcess) -> list[str]:
    """Return the last lines of a rank's log files that report an error or a timeout."""
    found: list[str] = []
    seen: set[str] = set()
    for descriptor in (2, 1):
        with contextlib.suppress(OSError):
            target = str(Path(f"/proc/{one.pid}/fd/{descriptor}").readlink())
            path = Path(f"/proc/{one.pid}/root{target}")
            if target not in seen and path.is_file():
                seen.add(target)
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _LOG_TAIL))
                    lines = file.read(_LOG_TAIL).decode("utf-8", "replace").splitlines()
                found += [clean(line.strip()[:_LINE_MAX]) for line in lines if _ERROR.search(line)]
    return found[-_LINES_MAX:]
