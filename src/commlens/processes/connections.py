"""TCP connections between processes of this host, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from commlens.model.grouping import grouped
from commlens.processes.process import read_lines, read_text, socket_inodes

ESTABLISHED: Final = "01"
LISTENS: Final = "0A"
_MAPPED: Final = "0000000000000000FFFF0000"
"""An IPv4 address as an IPv6 socket has it: `::ffff:127.0.0.1`."""
_LOOPBACK: Final = ("0100007F:", "00000000000000000000000001000000:")


class TcpRow(NamedTuple):
    """One socket of a network namespace; addresses as ``"0100007F:1F90"``."""

    local: str
    remote: str
    state: str
    inode: int


def tcp_rows(pid: int) -> Iterator[TcpRow]:
    """Return the TCP sockets of a process's network namespace; none if they cannot be read."""
    for table in ("tcp", "tcp6"):
        for line in read_lines(f"/proc/{pid}/net/{table}")[1:]:
            fields = line.split()
            if len(fields) > 9:
                local, remote = (each.removeprefix(_MAPPED) for each in fields[1:3])
                yield TcpRow(local, remote, fields[3], int(fields[9]))


def port_of(address: str) -> int:
    """``"0100007F:1F90"`` has the port 8080."""
    return int(address.rpartition(":")[2], 16)


def links_between(pids: Iterable[int]) -> dict[tuple[int, int], bool]:
    """Return the pairs of processes that are connected with each other, the lower pid first, and
    whether one of their connections has a port chosen by the kernel at both ends. Gloo and NCCL
    connect members of a group so; a server, such as a store, mostly has a port of its own.
    """
    first_free = int((read_text("/proc/sys/net/ipv4/ip_local_port_range") or "32768").split()[0])
    ends = grouped(
        ((namespace, row.local, row.remote), pid)
        for pid in sorted(pids)
        for namespace, row in _connections_of(pid)
    )
    found: dict[tuple[int, int], bool] = {}
    for (namespace, local, remote), holders in ends.items():
        free = min(port_of(local), port_of(remote)) >= first_free
        for link in (
            (pid, other)
            for pid in holders
            for other in ends.get((namespace, remote, local), ())
            if pid < other
        ):
            found[link] = found.get(link, False) or free
    return found


def _connections_of(pid: int) -> Iterator[tuple[str, TcpRow]]:
    """Return the connections that a process holds, each with its network namespace if it is within
    this host.
    """
    inodes = socket_inodes(pid)
    with contextlib.suppress(OSError):  # it has ended
        namespace = os.readlink(f"/proc/{pid}/ns/net") if inodes else ""  # noqa: PTH115
        for row in tcp_rows(pid) if inodes else ():
            if row.inode in inodes and row.state == ESTABLISHED:
                yield (namespace if row.local.startswith(_LOOPBACK) else ""), row
