"""The link between the nodes of a job, as a rank sees it: starting the node's relay, and arranging
by the job's store where relays meet.

The store is the one that torch's default group was made with, whatever its kind: ranks that met
there belong to one start of the job. torch's private names for it are used here only (tried with
torch 2.13).
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
_LOOK_S: Final = 0.05
_START_S: Final = 5.0  # the time that a relay takes to start, on a busy machine
_LOOPBACK: Final = ("127.", "::1", "localhost")


class Link:
    """A rank's part of linking its node to the others."""

    def __init__(self, folder: Path, rank: int, log_of_node: RefusalLog) -> None:
        self._folder = folder
        self._rank = rank
        self._log = log_of_node

    def establish(self) -> bool:
        """Wait until the boards of all ranks of the job can be read on this node, for about ten
        seconds at most.

        Returns:
            False if all ranks are on this node.
        """
        import torch.distributed as dist

        world_size = dist.get_world_size()
        here = self._ranks_here()
        if world_size in (len(here), launchers.number(os.environ, [launchers.LOCAL_WORLD_SIZE])):
            return False
        if self._rank == min(here):
            self._start_relay(world_size)
        until = time.monotonic() + PATIENCE_S + _START_S
        while self._log.link == refusal_log.CONNECTING and time.monotonic() < until:
            time.sleep(_NAP_S)
        return True

    def _ranks_here(self) -> set[int]:
        """Return the recorded ranks of this node that are alive, this one included."""
        return {
            self._rank,
            *(
                job_dirs.box_rank(box)
                for box in job_dirs.boxes(self._folder)
                if job_dirs.has_ended(box) is False
            ),
        }

    def _start_relay(self, world_size: int) -> None:
        """Start the relay, through a shell that ends at once: a program that waits for its children
        must not meet a child of ours.
        """
        store = _default_store()
        host = _store_host(store)
        address = _local_address(host) if self._rank == 0 else ""
        # The name of this machine may lead to its loopback device here, while other nodes reach it
        # by that name.
        listen_at = "0.0.0.0" if address.startswith(_LOOPBACK) else address
        environ = helper_process.environment(os.environ)
        to_relay, from_relay = os.pipe(), os.pipe()
        try:
            # In the job's folder, since the working directory may be gone, or hold modules with the
            # names of Python's own.
            helper_process.start(
                "commlens.verification.relay",
                str(self._folder.absolute()),
                str(world_size),
                listen_at,
                str(to_relay[0]),
                str(from_relay[1]),
                environ={**environ, "PYTHONPATH": helper_process.python_path()},
                cwd=self._folder,
                pass_fds=(to_relay[0], from_relay[1]),
            )
        finally:
            os.close(to_relay[0])
            os.close(from_relay[1])
        # In a thread: a store that does not answer must not hold up the program.
        pipes = from_relay[0], to_relay[1]
        threading.Thread(
            target=self._arrange,
            args=(store, host, address, pipes),
            name="commlens-link",
            daemon=True,
        ).start()

    def _arrange(self, store: Any, host: str, address: str, pipes: tuple[int, int]) -> None:
        """Publish the address where the relay of rank 0's node listens, or tell this node's relay
        what was published.
        """
        told = b""
        with (
            contextlib.suppress(Exception),
            os.fdopen(pipes[0], "rb") as said,
            os.fdopen(pipes[1], "wb") as tell,
        ):
            if address:
                store.set(_KEY, json.dumps({**json.loads(said.readline()), "host": address}))
                return
            until = time.monotonic() + PATIENCE_S
            while self._log.link == refusal_log.CONNECTING and time.monotonic() < until:
                # The key may first hold what an earlier start of the job left there: its relay is
                # gone, or knows these ranks already.
                if store.check([_KEY]) and (value := bytes(store.get(_KEY))) != told:
                    told = value
                    offer = json.loads(value)
                    tell.write(
                        json.dumps({**offer, "hosts": _reachable(offer["host"], host)}).encode()
                        + b"\n"
                    )
                    tell.flush()
                time.sleep(_LOOK_S)


def _reachable(published: str, store_host: str) -> list[str]:
    """Return the addresses at which rank 0's node may be reached from here: as published, or as the
    host of the store.
    """
    if published.startswith(_LOOPBACK) and store_host and not store_host.startswith(_LOOPBACK):
        return [store_host]
    return [*dict.fromkeys([published, store_host or published])]


def _default_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _store_host(store: Any) -> str:
    """Return the host of a TCPStore below any number of prefixes; else that of ``MASTER_ADDR``, or
    "".
    """
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return str(getattr(store, "host", "") or os.environ.get("MASTER_ADDR", ""))


def _local_address(host: str) -> str:
    """Return this machine's address on the way to a host, which is the one that the job's
    connections have. Sends nothing.
    """
    for target in (host, socket.gethostname()):
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"
