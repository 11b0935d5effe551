"""Whether anybody listens at the address where a rank of this host meets the others."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from commlens.launchers import AGENT_STORE
from commlens.model.ranklog import StoreSeen
from commlens.processes.connections import LISTENS, port_of, tcp_rows
from commlens.processes.process import environment

_LOOPBACK: Final = ("localhost", "127.", "::1", "[::1]")


def look_at_store(pid: int, host: str, port: str) -> StoreSeen | None:
    """Return what this host shows of an address at which a process meets the others; None if it is
    an address of another host, or the host's connections cannot be read.
    """
    rows = [*tcp_rows(pid)]
    if not port.isdecimal() or not rows or not _is_here(pid, host):
        return None
    listens = any(row.state == LISTENS and port_of(row.local) == int(port) for row in rows)
    agent = environment(pid).get(AGENT_STORE) == "True"
    return StoreSeen(f"{host}:{port}", listens, agent)


def _is_here(pid: int, host: str) -> bool:
    """Return whether a name or address is of this host. Names are not looked up: that may take
    seconds.
    """
    if host.startswith(_LOOPBACK):
        return True
    try:
        if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):  # noqa: PTH115
            return False
    except OSError:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host.strip("[]"))
    except OSError:
        return host == os.uname().nodename
    try:
        with socket.socket(family) as probe:
            probe.bind((host.strip("[]"), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
