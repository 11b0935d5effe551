"""Whether anybody listens at the address where a rank of this host meets the others."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from commlens.launchers import AGENT_STORE
from commlens.model.ranklog import StoreSeen
from commlens.processes.process import environment, read_lines

_LISTENS: Final = "0A"
_LOOPBACK: Final = ("localhost", "127.", "::1", "[::1]")


def look_at_store(pid: int, host: str, port: str) -> StoreSeen | None:
    """Return what this host shows of an address at which a process meets the others; None if it is
    an address of another host, or the host's connections cannot be read.
    """
    tables = [read_lines(f"/proc/{pid}/net/{table}")[1:] for table in ("tcp", "tcp6")]
    if not port.isdecimal() or not any(tables) or not _is_here(pid, host):
        return None
    suffix = f":{int(port):04X}"
    listens = any(
        fields[1].endswith(suffix) and fields[3] == _LISTENS
        for table in tables
        for line in table
        if len(fields := line.split()) > 3
    )
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
