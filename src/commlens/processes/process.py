"""The state of a process, from ``/proc`` and pidfds. Nothing here raises: a value that cannot be
read is None.

Field numbers are those of proc(5). Reading the state takes about 20 us.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from commlens.blackbox import job_dirs
from commlens.model.bypass import libraries_in
from commlens.text import INLINE_CODE, printable, signal_name

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

# ioctl(pidfd, PIDFD_GET_INFO), linux/pidfd.h, Linux 6.15: the exit status even after the parent has
# reaped the process.
_PIDFD_GET_INFO: Final = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO: Final = struct.Struct("<QQ11Ii")
_PIDFD_INFO_EXIT: Final = 1 << 3
_EXITING: Final = 1 << 2  # PF_EXITING, a flag in /proc/PID/stat

_BOX: Final = re.compile(rb"/rank\d+\.\d+\.box\b")
_COMMAND_MAX: Final = 80
_FLAGS: Final = "[bBdEhiIOPqsSuvxV?]*"  # the interpreter's options that take no value
# the interpreter with its options, of which -W and -X take a value
_PYTHON: Final = rf"[^ ]*(?: -{_FLAGS}[WX] ?[^ ]+| -(?!{_FLAGS}(?:[cm](?: |$)|[WX]))[^ ]+)*"
# a command line with code in it, and its beginning up to the code
_CODE: Final = re.compile(rf"^({_PYTHON} -{_FLAGS}c)(?: .*)?$", re.DOTALL)
# a command line with a module's name or a script
_PROGRAM: Final = re.compile(rf"^{_PYTHON} (?:-{_FLAGS}m |(?!-))(?:[^ ]*/)?(.+)$", re.DOTALL)
_DESCENDANTS_MAX: Final = 256
_FILE_MAX: Final = 1 << 24
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
# nlmsghdr; family, protocol, extensions, padding and states of inet_diag_req_v2
_DIAG_HEADER: Final = struct.Struct("=IHHIIBBBBI")
# nlmsghdr and inet_diag_msg: size and kind of the message, the own port (in network order), bytes
# in the send queue, the user, the inode; attributes follow
_DIAG_SOCKET: Final = struct.Struct("=IH14x2s54xIII")
_ATTRIBUTE: Final = struct.Struct("=HH")  # size, and name
_INET_DIAG_INFO: Final = 2  # the attribute that holds struct tcp_info
_TCP_BYTES_AT: Final = 120  # in that: bytes acknowledged, bytes received


@dataclass(frozen=True)
class Stat:
    """The state of a process at one moment."""

    # clock ticks from boot to its start: pid and start together identify a process
    start_ticks: int
    state: str  # "R", "S", "D", "T", "t", "Z", "X"
    cpu_s: float  # of all its threads, user and system
    reaped_cpu_s: float = 0.0  # of its child processes that have ended
    # wait status of a zombie; None while it runs, or if the kernel hides it
    exit_status: int | None = None

    @property
    def ended(self) -> bool:
        """Whether it no longer runs."""
        return self.state in job_dirs.ENDED


@dataclass(frozen=True)
class ProcessEnding:
    """How a process ended."""

    exit_code: int | None = None
    signal: str | None = None  # "SIGKILL"

    @classmethod
    def from_wait_status(cls, status: int) -> ProcessEnding:
        """Decode the status of wait(2)."""
        number = status & 0x7F
        if number:
            return cls(signal=signal_name(number))
        return cls(exit_code=(status >> 8) & 0xFF)


def read_text(path: str | Path) -> str | None:
    """Return a small file's text; None if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - read hundreds of times a minute: Path costs more than the read
            return file.read(65536).decode("utf-8", "replace")
    except OSError:
        return None


def read_lines(path: str) -> list[str]:
    """Return the lines of a file that may be larger than one read returns; none if it cannot be
    read.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as in read_text
            return file.read(_FILE_MAX).splitlines()
    except OSError:
        return []


def read_stat(pid: int) -> Stat | None:
    """Return the state of a process; None if it does not exist or is not visible."""
    fields = job_dirs.stat_fields(pid)
    try:
        state, start = fields[0], int(fields[19])
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        reaped = (int(fields[13]) + int(fields[14])) / _TICKS_PER_S
        status = int(fields[49]) if state in "ZX" else None
    except (IndexError, ValueError):
        return None
    return Stat(start, state, cpu, reaped, status) if start else None


def swapped_bytes(pid: int) -> float:
    """Return how much of a process's memory is in swap space; 0 if it cannot be read."""
    _, _, rest = (read_text(f"/proc/{pid}/status") or "").partition("\nVmSwap:")
    kilobytes = rest.split(None, 1)[:1]
    return float(kilobytes[0]) * 1024 if kilobytes and kilobytes[0].isdecimal() else 0.0


def is_ending(pid: int) -> bool:
    """Return whether a process has ended, or a signal is ending it: on a busy machine or with much
    memory that takes seconds.
    """
    status = read_text(f"/proc/{pid}/status") or ""
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", status, re.MULTILINE)
    if not pending or any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending):
        return True
    fields = job_dirs.stat_fields(pid)
    return fields[0] in job_dirs.ENDED or bool(int(fields[6]) & _EXITING)


def is_under_torchrun(pid: int) -> bool:
    """Return whether torchrun started a process, or one above it."""
    return "TORCHELASTIC_RUN_ID" in environment(pid)


def are_running_under_torchrun(pids: Collection[int]) -> bool:
    """Return whether none of these ranks is being ended, and neither is torchrun, which started
    them and would end all at once.
    """
    if not pids or any(map(is_ending, pids)):
        return False
    pid = next(iter(pids))
    launcher = read_stat(job_dirs.parent_of(pid))
    return launcher is not None and launcher.state == "S" and is_under_torchrun(pid)


def is_running(pid: int, start_ticks: int) -> bool:
    """Return whether this process still runs. With ``start_ticks`` 0, which means unknown, the pid
    alone decides.
    """
    stat = read_stat(pid)
    return stat is not None and not stat.ended and start_ticks in (0, stat.start_ticks)


def age_s(pid: int) -> float:
    """Return for how long a process has run; 0 if that cannot be read."""
    stat = read_stat(pid)
    if stat is None:
        return 0.0
    started = stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def io_bytes(pid: int) -> tuple[int, int] | None:
    """Return the bytes read and written so far: by calls that have returned, and from and to disks.

    The first count includes the page cache and pipes. A single write or copy of a large file moves
    only the second until it returns, and so do reads of a file that is mapped into memory.
    """
    counts = [
        int(count)
        for count in re.findall(
            r"^(?:[rw]char|(?:read|write)_bytes): (\d+)$", read_text(f"/proc/{pid}/io") or "", re.M
        )
    ]
    return (counts[0] + counts[1], counts[2] + counts[3]) if len(counts) == 4 else None


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def pids() -> list[int]:
    """Return all processes that this user sees."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208


def command_line(pid: int, most: int = 400) -> str:
    """Return the command line of a process, cut short; empty if it cannot be read."""
    words = (read_text(f"/proc/{pid}/cmdline") or "").rstrip("\0").replace("\0", " ")
    return printable(words if len(words) <= most else f"{words[:most]}...")


def short_command_of(pid: int) -> str:
    """Return the command line of a process without code that it holds: ``"python -c '...'"``."""
    return _CODE.sub(r"\1 '...'", command_line(pid))


def script_of(command: str) -> str:
    """Return the program in a Python command line, without the interpreter and its options;
    ``"python -c '...'"`` for code.
    """
    if _CODE.match(command):
        return INLINE_CODE
    found = _PROGRAM.match(command)
    program = found[1] if found else command
    return program if len(program) <= _COMMAND_MAX else f"{program[:_COMMAND_MAX]}..."


def runs_python(pid: int) -> bool:
    """Return whether a process is a Python interpreter."""
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))  # noqa: PTH115, PTH119
    except OSError:
        return False


def has_torch(pid: int) -> bool:
    """Return whether a process has loaded torch."""
    return any(b"libtorch" in line for line in _mapped(pid))


def keeps_box(pid: int) -> bool:
    """Return whether a process is recorded, or is the child of one that is."""
    return any(map(_BOX.search, _mapped(pid)))


def bypass_libraries(pid: int) -> list[str]:
    """Return the libraries in a process that communicate past torch's dispatcher."""
    return libraries_in(_mapped(pid))


def _mapped(pid: int) -> Iterator[bytes]:
    """Yield the lines of a process's memory map; none if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:  # noqa: PTH123
        yield from maps


def children(pid: int) -> list[int]:
    """Return the child processes, including zombies."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return []
    return [
        int(child)
        for thread in threads
        for child in (read_text(f"/proc/{pid}/task/{thread}/children") or "").split()
    ]


def descendants(pid: int, besides: Collection[int]) -> list[int]:
    """Return the child processes and theirs, without the subtrees of ``besides``."""
    found: list[int] = []
    parents = [pid]
    while parents and len(found) < _DESCENDANTS_MAX:
        new = [child for child in children(parents.pop()) if child not in besides]
        found += new
        parents += new
    return found


class TcpSocket(NamedTuple):
    """A connection."""

    moved: int  # bytes that the other side has acknowledged, and bytes received
    unsent: int  # bytes written that the other side has not acknowledged
    port: int = 0  # on this side


def tcp_sockets() -> dict[int, TcpSocket]:
    """Return the established TCP connections of this network namespace by inode, from sock_diag(7);
    none if it is not available.
    """
    found: dict[int, TcpSocket] = {}
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as link,
    ):
        link.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _DIAG_HEADER.pack(
                72, _SOCK_DIAG_BY_FAMILY, 0x301, 1, 0, family, socket.IPPROTO_TCP, 2, 0, 2
            )
            link.send(request + bytes(48))
            while _add_sockets(link.recv(1 << 17), found):
                pass
    return found


def _add_sockets(answer: bytes, found: dict[int, TcpSocket]) -> bool:
    """Add the sockets in one answer. Returns whether more answers follow."""
    at = 0
    while at + _DIAG_SOCKET.size <= len(answer):
        size, kind, port, unsent, _, inode = _DIAG_SOCKET.unpack_from(answer, at)
        if kind != _SOCK_DIAG_BY_FAMILY:
            return False
        attribute, end = at + _DIAG_SOCKET.size, at + size
        while attribute + _ATTRIBUTE.size <= end:
            length, name = _ATTRIBUTE.unpack_from(answer, attribute)
            counts_at = attribute + _ATTRIBUTE.size + _TCP_BYTES_AT
            if name == _INET_DIAG_INFO and attribute + length >= counts_at + 16:
                moved = sum(struct.unpack_from("=QQ", answer, counts_at))
                found[inode] = TcpSocket(moved, unsent, int.from_bytes(port, "big"))
            attribute += max(4, (length + 3) & ~3)  # attributes and messages are aligned to 4 bytes
        at += max(16, (size + 3) & ~3)
    return at > 0 and at >= len(answer)


def socket_inodes(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process has open."""
    found: set[int] = set()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)  # noqa: PTH115
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


class Handle:
    """A hold on one process: its end is noticed at once, and its exit status survives its parent's
    wait.

    Without pidfds (Linux before 5.3, some sandboxes), ``fileno`` is None and the caller polls.
    """

    fileno: int | None = None
    exists: bool = True
    ended_ns: int = 0  # Unix ns at which its end was noticed
    ended_alone: bool = False  # torchrun and all its other ranks ran on when its end was noticed
    _ending: ProcessEnding | None = None

    def __init__(self, pid: int, start_ticks: int = 0) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        try:
            self.fileno = os.pidfd_open(pid)
        except ProcessLookupError:
            self.exists = False
        except (OSError, AttributeError):
            pass
        if start_ticks and self.exists:  # the pid may have been reused before the pidfd was opened
            stat = read_stat(pid)
            if stat is None or stat.start_ticks != start_ticks:
                self.exists = False
                self.close()

    @classmethod
    def invisible(cls, pid: int) -> Handle:
        """Return a handle on a process that is not visible from here: on another host, or in
        another pid namespace.
        """
        handle = cls.__new__(cls)
        handle.pid, handle.start_ticks = pid, 0
        return handle

    def ending(self) -> ProcessEnding | None:
        """Return how the process ended: None while it runs, an empty Ending if that is no longer
        known.
        """
        if self._ending is None:
            self._ending = self._read_ending()
            self.ended_ns = time.time_ns() if self._ending is not None else 0
        return self._ending

    def _read_ending(self) -> ProcessEnding | None:
        if not self.exists:
            return ProcessEnding()
        child = self._as_child()
        if child is not None:
            return child
        stat = read_stat(self.pid)
        if stat is not None and self.start_ticks in (0, stat.start_ticks):
            if not stat.ended:
                return None
            if stat.exit_status is not None:
                return ProcessEnding.from_wait_status(stat.exit_status)
        return self._after_reaping() or ProcessEnding()

    def _as_child(self) -> ProcessEnding | None:
        """Read the status as the parent, without reaping the process: torchrun's agent does
        that.
        """
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except (OSError, AttributeError):
            return None
        if info is None or info.si_pid != self.pid:
            return None
        if info.si_code == os.CLD_EXITED:
            return ProcessEnding(exit_code=info.si_status)
        return ProcessEnding(signal=signal_name(info.si_status))

    def _after_reaping(self) -> ProcessEnding | None:
        if self.fileno is None:
            return None
        buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self.fileno, _PIDFD_GET_INFO, buffer, True)
        except OSError:
            return None
        mask, *_, status = _PIDFD_INFO.unpack(buffer)
        return ProcessEnding.from_wait_status(status) if mask & _PIDFD_INFO_EXIT else None

    def close(self) -> None:
        """Close the pidfd."""
        if self.fileno is not None:
            os.close(self.fileno)
            self.fileno = None


def cpu_wait_ns(pid: int) -> int | None:
    """Return for how long the main thread was ready to run and had no CPU, in ns since its start:
    the second field of schedstat.
    """
    fields = (read_text(f"/proc/{pid}/schedstat") or "").split()
    return int(fields[1]) if len(fields) == 3 and fields[1].isdigit() else None


class CoreTimes(NamedTuple):
    """How a thread got cores since its start."""

    waited_ns: int  # ready to run, without a core; only waits that have ended
    ran_ns: int
    is_ready: bool  # runs now, or waits for a core
    sleeps: int  # how often it has slept: its voluntary context switches


def core_times(pid: int) -> dict[int, CoreTimes]:
    """Return how the threads of a process got cores, by thread id."""
    times: dict[int, CoreTimes] = {}
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
            fields = (read_text(f"/proc/{pid}/task/{thread}/schedstat") or "").split()
            status = read_text(f"/proc/{pid}/task/{thread}/status") or ""
            sleeps = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.M)
            if len(fields) == 3 and sleeps:
                is_ready = "\nState:\tR" in status
                times[thread] = CoreTimes(int(fields[1]), int(fields[0]), is_ready, int(sleeps[1]))
    return times


def longest_cpu_wait_ns(
    before: dict[int, CoreTimes], after: dict[int, CoreTimes], between_ns: int
) -> int:
    """Return the longest wait for a core of a thread between two moments. The kernel counts a wait
    only when it ends; but a thread that was ready at both moments and has not slept has waited for
    all the time in which it did not run.
    """
    return max(
        (
            between_ns - (now.ran_ns - then.ran_ns)
            if now.is_ready and then.is_ready and now.sleeps == then.sleeps
            else now.waited_ns - then.waited_ns
            for thread, now in after.items()
            if (then := before.get(thread)) is not None
        ),
        default=0,
    )
