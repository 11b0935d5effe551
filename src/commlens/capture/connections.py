"""The connections of a process group, and how to close them: a thread that waits in the backend's
C++ then gets an error.

``ProcessGroup.abort`` does that for NCCL only: gloo inherits one that does nothing (seen on torch
2.13). Gloo connects all pairs of ranks while the group is made, so the sockets that are new then
are the group's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from pathlib import Path
from typing import Any

from commlens.tap.hand_made import innermost_store

_DESCRIPTORS = Path("/proc/self/fd")
_WELL_KNOWN_PORTS = 1023
_sockets: weakref.WeakKeyDictionary[Any, dict[Path, str]] = weakref.WeakKeyDictionary()  # by group


def sockets() -> dict[Path, str]:
    """Return the kernel's names of this process's sockets, by descriptor."""
    names = {descriptor: _name(descriptor) for descriptor in _DESCRIPTORS.iterdir()}
    return {descriptor: name for descriptor, name in names.items() if name.startswith("socket:")}


def note(process_group: Any, before: dict[Path, str]) -> None:
    """Note the sockets that were opened since there were those ``before`` as a new group's."""
    if hasattr(process_group, "rank"):  # not torch's number for "this rank is no member"
        _sockets[process_group] = dict(sockets().items() - before.items())


def abort(process_group: Any) -> None:
    """Make the collectives of a group that are in flight fail, here and on its other ranks. The
    group cannot be used afterwards.
    """
    for descriptor, name in _sockets.pop(process_group, {}).items():
        with contextlib.suppress(OSError):
            # the descriptor may become another's at any moment, the copy stays
            copy = os.dup(int(descriptor.name))
            if _name(_DESCRIPTORS / str(copy)) == name:
                _shut_down(socket.socket(fileno=copy))
            else:
                os.close(copy)
    with contextlib.suppress(Exception):
        process_group.abort()  # at last: NCCL's may block


def _shut_down(connection: socket.socket) -> None:
    """Shut down a connection that may be gloo's. The kernel chooses gloo's ports, so none is
    well-known or the store's.
    """
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ports = {connection.getsockname()[1], connection.getpeername()[1]}
        if min(ports) > _WELL_KNOWN_PORTS and _store_port() not in ports:
            connection.shutdown(socket.SHUT_RDWR)


def _store_port() -> int:
    """Return the port of the job's store, which serves other groups, too; 0 if there is none."""
    import torch.distributed.distributed_c10d as c10d

    with contextlib.suppress(Exception):
        return int(innermost_store(c10d._get_default_store()).port)
    return 0


def _name(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""
