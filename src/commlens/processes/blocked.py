"""What a process that does not move waits for, as the kernel shows it: a file lock, a pipe, a
connection, a child process, a sleep.

Nothing here raises: what cannot be read is left out. Locks of Python and waits for several files at
once (poll) do not show.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from commlens.processes.connections import tcp_rows
from commlens.processes.process import (
    children,
    command_line,
    descendants,
    read_lines,
    read_stat,
    read_text,
)
from commlens.text import printable, signal_name

_CALLS: Final = {
    "x86_64": {
        0: "read",
        17: "read",
        19: "read",
        45: "read",
        47: "read",
        1: "write",
        20: "write",
        44: "write",
        46: "write",
        42: "connect",
        43: "accept",
        288: "accept",
        35: "sleep",
        230: "sleep",
        61: "wait",
        247: "wait",
        72: "lock",
        73: "lock",
        2: "open",
        257: "open",
        23: "select",
        270: "select",
    },
    "aarch64": {
        63: "read",
        65: "read",
        67: "read",
        207: "read",
        212: "read",
        64: "write",
        66: "write",
        206: "write",
        211: "write",
        203: "connect",
        202: "accept",
        242: "accept",
        101: "sleep",
        115: "sleep",
        260: "wait",
        95: "wait",
        25: "lock",
        32: "lock",
        56: "open",
        72: "select",
    },
}
"""Numbers of system calls that wait for one thing, by machine."""
_WAIT4: Final = {61, 260}  # its first argument is the pid; the second one of waitid
_CLOCK_NANOSLEEP: Final = {230, 115}
_UNTIL: Final = [time.CLOCK_MONOTONIC, 1]  # the clock, and that the time is a moment of it
_COMMAND_MAX: Final = 80


class ProcessWait(NamedTuple):
    """The file, lock or call for which a process waits."""

    text: str = ""  # "it waits to read from a pipe"; empty if it does not show
    holder: int = 0  # of a lock: the process that has it, if it is known
    wakes_ns: int = 0  # of a sleep: CLOCK_MONOTONIC, at which it ends; 0: unknown


def waits_for(pid: int) -> ProcessWait:
    """Return what the main thread of a process waits for."""
    fields = (read_text(f"/proc/{pid}/syscall") or "").split()
    if len(fields) < 4 or not fields[0].isdecimal():
        return ProcessWait()
    number, arguments = int(fields[0]), [int(field, 16) for field in fields[1:4]]
    call = _CALLS.get(os.uname().machine, {}).get(number, "")
    if call == "sleep":
        until_ns = _deadline_ns(pid, arguments) if number in _CLOCK_NANOSLEEP else 0
        return ProcessWait("it sleeps", wakes_ns=until_ns)
    if call == "select":  # up to Python 3.10, time.sleep is a select without files
        return ProcessWait("" if arguments[0] else "it sleeps")
    if call == "wait":
        return ProcessWait(_child(pid, arguments[0] if number in _WAIT4 else arguments[1]))
    if call == "open":
        is_fifo = read_text(f"/proc/{pid}/wchan") == "wait_for_partner"
        return ProcessWait("it waits for another process to open a named pipe" if is_fifo else "")
    if call == "lock":
        return _lock(pid, arguments[0])
    return ProcessWait(_file(pid, call, arguments[0]) if call else "")


def _deadline_ns(pid: int, arguments: Sequence[int]) -> int:
    """Return until when ``time.sleep`` of Python 3.11 or later sleeps, CLOCK_MONOTONIC ns; 0 if it
    is another sleep, or its memory cannot be read.
    """
    if arguments[:2] != _UNTIL:
        return 0
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(arguments[2])
            seconds, ns = struct.unpack("@ql", memory.read(16))
    except (OSError, ValueError, OverflowError, struct.error):
        return 0
    return int(seconds * 1_000_000_000 + ns)


def _child(pid: int, child: int) -> str:
    known = children(pid)
    if child not in known and len(known) == 1:
        child = known[0]
    return (
        f"it waits for its child process {_named(child)}"
        if child in known
        else "it waits for a child process"
    )


def lost_child(pid: int) -> str:
    """Return which child of a process is stopped, or has failed and was not waited for:
    ``"its child process 71 (python) is stopped"``; empty if there is none.
    """
    for child in children(pid):
        seen = read_stat(child)
        program = printable((read_text(f"/proc/{child}/comm") or "").strip())
        name = f"its child process {child} ({program})"
        if seen is not None and seen.state in "Tt":
            return f"{name} is stopped"
        if seen is not None and seen.exit_status:
            code = os.waitstatus_to_exitcode(seen.exit_status)
            how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with status {code}"
            return f"{name} {how}"
    return ""


def _lock(pid: int, descriptor: int) -> ProcessWait:
    """Return which file's lock the process waits for, and which process has it. ``/proc/locks``
    lists a lock and then its waiters.
    """
    path = _target(pid, descriptor)
    # each line with the number of a lock, the arrow of a process that waits for it, and the pid
    lines = "\n".join(read_lines("/proc/locks"))
    rows = re.findall(r"^(\d+): (-> )?(?:\S+\s+){3}(-?\d+) ", lines, re.MULTILINE)
    awaited = {number for number, arrow, waiter in rows if arrow and int(waiter) == pid}
    holders = [int(each) for number, arrow, each in rows if number in awaited and not arrow]
    if not holders:
        return ProcessWait()
    holder = holders[0]
    lock = f"it waits for the lock of {path or 'a file'}"
    if holder <= 0:
        return ProcessWait(lock)
    # The kernel names the process that took the lock. The lock lives as long as the open file,
    # which children inherit.
    owner = next((one for one in (holder, *descendants(holder, ())) if _has_open(one, path)), 0)
    if not owner:
        return ProcessWait(
            f"{lock}, which process {holder} took: a former child of it may still hold it"
        )
    return ProcessWait(f"{lock}, which process {_named(owner)} holds", owner)


def _has_open(pid: int, path: str) -> bool:
    try:
        return any(_target(pid, int(name)) == path for name in os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    except OSError:
        return False


def _file(pid: int, call: str, descriptor: int) -> str:
    """Return what the process waits for in a call on an open file."""
    target = _target(pid, descriptor)
    if target.startswith("socket:["):
        peer = _peer(pid, int(target[8:-1]))
        if call == "accept" or (call == "connect" and not peer):
            return "it waits for a connection"
        return {
            "connect": f"it waits for a connection to {peer}",
            "read": f"it waits for data from {peer or 'a socket'}",
            "write": f"it waits for {peer or 'the other side of a socket'} to take its data",
        }[call]
    if call not in ("read", "write") or not target:
        return ""
    if target.startswith("pipe:["):
        return (
            "it waits to read from a pipe"
            if call == "read"
            else "it waits to write to a pipe that is full"
        )
    if call == "read" and target.startswith(("/dev/pts/", "/dev/tty")):
        return "it waits for input from its terminal"
    return f"it waits to {'read from' if call == 'read' else 'write to'} {target}"


def _target(pid: int, descriptor: int) -> str:
    try:
        return printable(os.readlink(f"/proc/{pid}/fd/{descriptor}"))  # noqa: PTH115 - of a socket or a pipe, this is no path
    except OSError:
        return ""


def _peer(pid: int, inode: int) -> str:
    """Return the address of the other side of a TCP socket; empty for other sockets."""
    return next((_address(row.remote) for row in tcp_rows(pid) if row.inode == inode), "")


def _address(text: str) -> str:
    """``"0100007F:1F90"`` is ``"127.0.0.1:8080"``: words of four bytes in the machine's order, and
    the port.
    """
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    if len(raw) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, raw)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{int(port, 16)}"


def _named(pid: int) -> str:
    """``"4242 (python train.py)"``."""
    words = command_line(pid, _COMMAND_MAX)
    return f"{pid} ({words})" if words else str(pid)
