"""Link a rank's node to the other nodes of the job: start the node's relay, and exchange the
address of rank 0's relay through the job's store.

The store is that of torch's default group, whatever its kind: ranks that met there belong to one
start of the job. Only this module uses torch's private name for it (tried with torch 2.13).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from commlens import helper_process, launchers
from commlens.blackbox import job_dirs
from commlens.boards import refusal_log
from commlens.boards.refusal_log import RefusalLog
from commlens.verification.relay.node_relay import PATIENCE_S

log = logging.getLogger("commlens")

_KEY: Final = "commlens/strict"
_NAP_S: Final = 0.001
_STORE_PERIOD_S: Final = 0.05
_START_S: Final = 5.0  # the time that a relay takes to start, on a busy machine
_LOOPBACK: Final = ("127.", "::1", "localhost")


def link_nodes(folder: Path, rank: int, log_of_node: RefusalLog) -> bool:
    """Wait until the boards of all ranks of the job can be read on this node, for about ten
    seconds at most.

    Args:
        folder: the job's folder of black boxes.
        rank: this rank.
        log_of_node: the refusals of this node, which show the state of the link.

    Returns:
        False if all ranks are on this node.
    """
    import torch.distributed as dist

    world_size = dist.get_world_size()
    # the recorded ranks of this node that are alive, this one included
    here = {
        rank,
        *(
            job_dirs.box_rank(box)
            for box in job_dirs.boxes(folder)
            if job_dirs.has_ended(box) is False
        ),
    }
    if world_size in (len(here), launchers.number(os.environ, [launchers.LOCAL_WORLD_SIZE])):
        return False
    if rank == min(here):
        _start_relay(folder, rank, log_of_node, world_size)
    until = time.monotonic() + PATIENCE_S + _START_S
    while log_of_node.link == refusal_log.CONNECTING and time.monotonic() < until:
        time.sleep(_NAP_S)
    return True


def _start_relay(folder: Path, rank: int, log_of_node: RefusalLog, world_size: int) -> None:
    """Start the relay, and a thread that exchanges the address of rank 0's relay."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    host = _store_host(store)
    address = _local_address(host) if rank == 0 else ""
    # On this machine, its own name may resolve to a loopback address, while other nodes reach
    # it by that name.
    listen_at = "0.0.0.0" if address.startswith(_LOOPBACK) else address
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):  # a program may have set another default for all sockets
        end.settimeout(None)
    with theirs:
        # It runs in the job's folder, because the working directory may be gone, or hold
        # modules with the names of Python's own.
        helper_process.start(
            "commlens.verification.relay",
            str(folder.absolute()),
            str(world_size),
            listen_at,
            str(theirs.fileno()),
            environ={
                **helper_process.environment(os.environ),
                "PYTHONPATH": helper_process.python_path(),
            },
            cwd=folder,
            pass_fds=(theirs.fileno(),),
        )
    # A thread, because a store that does not answer must not hold up the program.
    threading.Thread(
        target=_exchange_address,
        args=(store, host, address, ours, log_of_node),
        name="commlens-link",
        daemon=True,
    ).start()


def _exchange_address(
    store: Any, host: str, address: str, relay: socket.socket, log_of_node: RefusalLog
) -> None:
    """Publish the address of rank 0's relay on its node; on the others, pass what is published
    to this node's relay.
    """
    passed_on = b""
    with contextlib.suppress(Exception), relay:
        if address:
            offer = json.loads(relay.makefile("rb").readline())
            store.set(_KEY, json.dumps({**offer, "host": address}))
            return
        until = time.monotonic() + PATIENCE_S
        while log_of_node.link == refusal_log.CONNECTING and time.monotonic() < until:
            # The key may still hold the address of a relay of an earlier start of the job,
            # which is gone, or refuses these ranks because it has them already. So we pass on
            # later values, too.
            if store.check([_KEY]) and (value := bytes(store.get(_KEY))) != passed_on:
                passed_on = value
                offer = json.loads(value)
                hosts = _reachable(offer["host"], host)
                relay.sendall(json.dumps({**offer, "hosts": hosts}).encode() + b"\n")
            time.sleep(_STORE_PERIOD_S)


def _reachable(published: str, store_host: str) -> list[str]:
    """Return the published address, and that of the store, of rank 0's node."""
    if published.startswith(_LOOPBACK) and store_host and not store_host.startswith(_LOOPBACK):
        return [store_host]
    return [*dict.fromkeys([published, store_host or published])]


def _store_host(store: Any) -> str:
    """Return the host of the TCPStore that the store wraps, if any; else ``MASTER_ADDR``, or ""."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return str(getattr(store, "host", "") or os.environ.get("MASTER_ADDR", ""))


def _local_address(host: str) -> str:
    """Return the address of our end of a connection to a host; nothing is sent."""
    for target in (host, socket.gethostname()):
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"
