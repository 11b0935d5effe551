"""Runs the native code's driver, one instruction at a time where asked, and hands out what its file
held after each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from pathlib import Path

from commlens.errors import NativeEngineError
from commlens.native.build import find_compiler

HERE = Path(__file__).parent
NO_PTRACE = 3  # the driver's exit status
COMMON = ("-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-pthread")
_STATE = struct.Struct("<QQQQ")  # instructions run, lines begun, lines done, words that changed
_CHANGE = struct.Struct("<QQ")  # offset, value


class LeftOutError(Exception):
    """Something cannot be done here, and why."""


@dataclass(frozen=True)
class State:
    """What the script had come to."""

    instructions: int
    begun: int  # lines of the script
    done: int

    def __str__(self) -> str:
        return f"after {self.instructions} instructions, in line {self.begun}"


def build(folder: Path, name: str, *flags: str, compiler: Sequence[str] = ()) -> Path:
    """Compile the driver.

    Raises:
        LeftOutError: there is no compiler, or it has not got what the flags ask for.
    """
    try:
        compiler = compiler or find_compiler(os.environ)
    except NativeEngineError as error:
        raise LeftOutError(str(error)) from None
    driver = folder / name
    command = [*compiler, *COMMON, *flags, str(HERE / "driver.cpp"), "-o", str(driver)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    missing = [
        line
        for line in ended.stderr.splitlines()
        if "cannot find" in line and ("tsan" in line or "asan" in line or "ubsan" in line)
    ]
    if ended.returncode and missing:
        raise LeftOutError(f"the compiler has no runtime for {' '.join(flags)}: {missing[0]}")
    assert ended.returncode == 0, ended.stderr
    return driver


def run(command: Sequence[str | Path], *, timeout: float = 150) -> str:
    """Run the driver; what it printed."""
    ended = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout
    )
    assert ended.returncode == 0, (
        f"{' '.join(map(str, command))}: exit status"
        f" {ended.returncode}\n{ended.stdout}{ended.stderr}"
    )
    return ended.stdout


def step(driver: Path, kind: str, file: Path, lines: Sequence[str], folder: Path) -> Path:
    """Play a script on a file, one instruction at a time.

    Returns:
        The file with the states; :func:`states` reads it.

    Raises:
        LeftOutError: this system does not let one process trace another.
    """
    script, found = folder / f"{kind}.script", folder / f"{kind}.states"
    script.write_text("".join(line + "\n" for line in lines))
    ended = subprocess.run(
        [driver, "step", kind, file, script, found], capture_output=True, text=True, timeout=300
    )
    if ended.returncode == NO_PTRACE:
        raise LeftOutError("this system does not let one process trace another (ptrace)")
    assert ended.returncode == 0, ended.stderr
    return found


def states(found: Path, image: MutableSequence[int]) -> Iterator[State]:
    """Each state in turn; ``image``, which begins as what the file held before, is brought up to
    it.
    """
    content, at = found.read_bytes(), 0
    while at < len(content):
        instructions, begun, done, count = _STATE.unpack_from(content, at)
        at += _STATE.size
        for offset, value in _CHANGE.iter_unpack(content[at : at + count * _CHANGE.size]):
            image[offset : offset + 8] = value.to_bytes(8, "little")
        at += count * _CHANGE.size
        yield State(instructions, begun, done)


def kill_after(driver: Path, file: Path, threads: int, seconds: float) -> None:
    """Start many threads that write into a file, and kill them all at once."""
    with subprocess.Popen([driver, "write", file, str(threads)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                writer.wait(seconds)
        finally:
            writer.kill()
    assert writer.returncode == -signal.SIGKILL, f"the writer ended by itself: {writer.returncode}"
