"""A process as `/proc` and its cgroup show it. Nothing here raises: what cannot be read is None.

Field numbers are those of proc(5). Costs about 20 us for one look.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

# ioctl(pidfd, PIDFD_GET_INFO), linux/pidfd.h, Linux 6.15: the exit status even after the parent has reaped the process.
_PIDFD_GET_INFO: Final = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO: Final = struct.Struct("<QQ11Ii")
_PIDFD_INFO_EXIT: Final = 1 << 3


@dataclass(frozen=True)
class Look:
    """One look at a process."""

    start_ticks: int  # clock ticks from boot to its start: pid and start together name one process
    state: str  # "R", "S", "D", "T", "t", "Z", "X"
    cpu_s: float  # CPU time of all its threads, user and system
    exit_status: int | None = None  # wait status of a zombie; None while it runs, or where the kernel hides it

    @property
    def ended(self) -> bool:
        """Whether it no longer runs (a zombie has ended: only its parent does not know yet)."""
        return self.state in ("Z", "X", "x")


@dataclass(frozen=True)
class Ending:
    """How a process ended."""

    exit_code: int | None = None
    signal: str | None = None  # "SIGKILL"

    @classmethod
    def from_wait_status(cls, status: int) -> Ending:
        """Read the status that wait(2) gives."""
        number = status & 0x7F
        if number:
            return cls(signal=signal_name(number))
        return cls(exit_code=(status >> 8) & 0xFF)


def signal_name(number: int) -> str:
    """``9 -> "SIGKILL"``; a number without a name stays a number (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_text(path: str | Path) -> str | None:
    """A small file's text, None where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - read hundreds of times a minute: Path costs more than the read
            return file.read(65536).decode("utf-8", "replace")
    except OSError:
        return None


def look(pid: int) -> Look | None:
    """Look at a process; None when it does not exist (or cannot be seen from here)."""
    text = read_text(f"/proc/{pid}/stat")
    if not text:
        return None
    # The command's name (field 2) may hold spaces and parentheses: count from the last parenthesis, which field 3 follows.
    fields = text[text.rfind(")") + 2 :].split()
    try:
        state, start = fields[0], int(fields[19])
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        status = int(fields[49]) if state in "ZX" else None
    except (IndexError, ValueError):
        return None
    return Look(start, state, cpu, status)


def thread_states(pid: int) -> dict[int, str]:
    """The state of every thread. A process may be stopped, or in uninterruptible sleep, in one of them only."""
    states: dict[int, str] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return states
    for thread in threads:
        text = read_text(f"/proc/{pid}/task/{thread}/stat")
        if text:
            states[int(thread)] = text[text.rfind(")") + 2 : text.rfind(")") + 3]
    return states


def runs(pid: int, start_ticks: int) -> bool:
    """Whether that very process still runs. ``start_ticks`` 0: not known, the pid alone has to do."""
    seen = look(pid)
    return seen is not None and not seen.ended and start_ticks in (0, seen.start_ticks)


def io_bytes(pid: int) -> int | None:
    """Bytes read and written so far, page cache and pipes included."""
    text = read_text(f"/proc/{pid}/io")
    if not text:
        return None
    total = 0
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in ("rchar", "wchar"):
            try:
                total += int(value)
            except ValueError:
                return None
    return total


def pid_namespace(pid: int | str = "self") -> str | None:
    """Identity of its pid namespace: a pid means nothing in another one."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def environment(pid: int) -> dict[str, str]:
    """The environment that it was started with; empty where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def children(pid: int) -> list[int]:
    """Its child processes, zombies included."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return found
    for thread in threads:
        found += [int(child) for child in (read_text(f"/proc/{pid}/task/{thread}/children") or "").split()]
    return found


class Handle:
    """Holds on to one process, so that its end is noticed at once and its status is not lost to its parent's wait.

    Where pidfds are missing (Linux before 5.3, some sandboxes), ``fileno`` is None and the caller polls.
    """

    def __init__(self, pid: int, start_ticks: int = 0) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self.fileno: int | None = None
        self.exists: bool = True
        try:
            self.fileno = os.pidfd_open(pid)
        except ProcessLookupError:
            self.exists = False
        except (OSError, AttributeError):
            pass
        if start_ticks and self.exists:  # the pid may have been given to another process before the pidfd was opened
            seen = look(pid)
            if seen is None or seen.start_ticks != start_ticks:
                self.exists = False
                self.close()

    @classmethod
    def nobody(cls, pid: int) -> Handle:
        """A handle on a process that cannot be seen from here: another host, another pid namespace."""
        handle = cls.__new__(cls)
        handle.pid, handle.start_ticks, handle.fileno, handle.exists = pid, 0, None, True
        return handle

    def ending(self) -> Ending | None:
        """How it ended: None while it runs, an empty Ending where nobody can say any more."""
        if not self.exists:
            return Ending()
        child = self._as_child()
        if child is not None:
            return child
        seen = look(self.pid)
        if seen is not None and (not self.start_ticks or seen.start_ticks == self.start_ticks):
            if not seen.ended:
                return None
            if seen.exit_status is not None:
                return Ending.from_wait_status(seen.exit_status)
        return self._after_reaping() or Ending()

    def _as_child(self) -> Ending | None:
        """As its parent, leaving it for whoever reaps it (torchrun's agent)."""
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except (OSError, AttributeError):
            return None
        if info is None or info.si_pid != self.pid:
            return None
        if info.si_code == os.CLD_EXITED:
            return Ending(exit_code=info.si_status)
        return Ending(signal=signal_name(info.si_status))

    def _after_reaping(self) -> Ending | None:
        if self.fileno is None:
            return None
        buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.fileno, _PIDFD_GET_INFO, buffer, True)
        except OSError:
            return None
        mask, *_, status = _PIDFD_INFO.unpack(buffer)
        return Ending.from_wait_status(status) if mask & _PIDFD_INFO_EXIT else None

    def close(self) -> None:
        """Let go of it."""
        if self.fileno is not None:
            os.close(self.fileno)
            self.fileno = None


@dataclass(frozen=True)
class CgroupLook:
    """Counters of a process's cgroup, as far as they can be read."""

    throttled_s: float | None = None  # time for which its CPU quota kept it from running, since the cgroup was made
    throttled_times: int | None = None
    oom_kills: int | None = None
    memory_pressure: float | None = None  # PSI "full avg10", percent of the last 10 s in which everyone in it waited for memory
    memory_used: float | None = None  # fraction of its limit


@dataclass
class Cgroup:
    """The files of a process's cgroup, v1 or v2, found once and read many times."""

    cpu: list[Path] = field(default_factory=list)
    memory: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, pid: int, root: Path = Path("/sys/fs/cgroup")) -> Cgroup:
        """Find them. In a container the path in ``/proc/PID/cgroup`` is often the host's; then the mount's own root is meant."""
        found = cls()
        for line in (read_text(f"/proc/{pid}/cgroup") or "").splitlines():
            parts = line.split(":", 2)
            if len(parts) != 3:
                continue
            _, controllers, inside = parts
            inside = inside.lstrip("/")
            names = controllers.split(",")
            if not controllers:
                bases = [root, root / "unified"]
            elif "cpu" in names or "memory" in names:
                bases = [root / controllers, *(root / name for name in names)]
            else:
                continue
            for base in bases:
                folder = next((f for f in (base / inside, base) if (f / "cgroup.procs").exists()), None)
                if folder is None:
                    continue
                # v1 first: where both are mounted, the controllers are v1's and v2's files lack their counters.
                if "cpu" in names:
                    found.cpu.insert(0, folder)
                if "memory" in names:
                    found.memory.insert(0, folder)
                if not controllers:
                    found.cpu.append(folder)
                    found.memory.append(folder)
                break
        return found

    def look(self) -> CgroupLook:
        """Read the counters."""
        throttled_s: float | None = None
        times: int | None = None
        for folder in self.cpu:
            stat = _counters(folder / "cpu.stat")
            if "throttled_usec" in stat:
                throttled_s = stat["throttled_usec"] / 1e6
            elif "throttled_time" in stat:
                throttled_s = stat["throttled_time"] / 1e9
            if throttled_s is not None:
                times = stat.get("nr_throttled")
                break
        kills: int | None = None
        used: float | None = None
        pressure = None
        for folder in self.memory:
            if kills is None:
                kills = _counters(folder / "memory.events").get("oom_kill")
            if kills is None:
                kills = _counters(folder / "memory.oom_control").get("oom_kill")
            if pressure is None:
                pressure = _full_avg10(folder / "memory.pressure")
            if used is None:
                used = _ratio(folder / "memory.current", folder / "memory.max")
            if used is None:
                used = _ratio(folder / "memory.usage_in_bytes", folder / "memory.limit_in_bytes")
        if pressure is None:
            pressure = _full_avg10(Path("/proc/pressure/memory"))
        return CgroupLook(throttled_s, times, kills, pressure, used)


def _counters(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if value.strip().lstrip("-").isdigit():
            found[key] = int(value)
    return found


def _full_avg10(path: Path) -> float | None:
    for line in (read_text(path) or "").splitlines():
        if line.startswith("full "):
            for item in line.split():
                if item.startswith("avg10="):
                    try:
                        return float(item[6:])
                    except ValueError:
                        return None
    return None


def _ratio(used: Path, limit: Path) -> float | None:
    try:
        return int(read_text(used) or "") / int(read_text(limit) or "")
    except (ValueError, ZeroDivisionError):  # absent, or "max"
        return None


def unix_ns(monotonic_ns: int) -> int:
    """The Unix time of a CLOCK_MONOTONIC moment on this host."""
    return time.time_ns() - (time.monotonic_ns() - monotonic_ns)
