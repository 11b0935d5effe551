"""Find the places where the watchers of a job's nodes can meet: the job's own store, or a folder
that the nodes share.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commlens.errors import FormatError
from commlens.processes import process
from commlens.watch.nodes.beat import key
from commlens.watch.nodes.folder_client import FolderClient
from commlens.watch.nodes.store_client import KeepWaiting, StoreClient
from commlens.watch.roster import Member
from commlens.watch.snapshot import have_joined
from commlens.watch.strangers import meeting_of

TIMEOUT_S: Final = 1.0
ANSWER_S: Final = 3.0

Client = StoreClient | FolderClient
"""Values under keys. All methods raise OSError if the store or the folder cannot be reached."""


def stored(client: Client, kind: str, numbers: Iterable[int]) -> dict[int, bytes]:
    """Return the values of this kind that are there, by number.

    Args:
        client: of the meeting place.
        kind: of the values: the first part of their key.
        numbers: the second part: mostly the slots of nodes.
    """
    numbered = {key(kind, number): number for number in numbers}
    there = client.existing_keys(list(numbered))
    return {numbered[name]: value for name, value in zip(there, client.get(there), strict=True)}


@dataclass(frozen=True)
class Store:
    """The job's TCPStore as a place to meet."""

    host: str
    port: int
    # whether torchrun's agent serves it, which ends after its ranks; if not, rank 0 serves it
    of_agent: bool = False
    # begins all keys: worlds meet beside the nodes of one, in the store of a group made by hand
    within: str = ""

    def __str__(self) -> str:
        whose = "group" if self.within else "job"
        return f"the {whose}'s store at {self.host}:{self.port}"

    def open(self, keep_waiting: KeepWaiting) -> Client:
        """Connect to it. ``keep_waiting`` is called every few seconds while no answer comes."""
        return StoreClient(
            self.host,
            self.port,
            timeout_s=TIMEOUT_S,
            answer_s=ANSWER_S,
            keep_waiting=keep_waiting,
            within=self.within,
        )

    def ends_with_this_node(self) -> bool:
        """Return whether it ends only when all ranks of this node have ended: torchrun's agent
        serves it, on this machine.
        """
        if not self.of_agent:
            return False
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, 0, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class Folder:
    """A folder as a place to meet, if the nodes share it."""

    path: Path

    def __str__(self) -> str:
        return f"the folder {self.path.parent}"

    def open(self, _keep_waiting: KeepWaiting) -> Client:
        """Create it if it does not exist."""
        return FolderClient(self.path)

    def ends_with_this_node(self) -> bool:
        """Return False: a shared folder is on a file server."""
        return False


Place = Store | Folder
"""A place to meet. Its text names it in a sentence."""


def places(members: Sequence[Member], folder: Path | None) -> list[Place]:
    """Return the places where this node may meet the others, the best one first; none if all ranks
    are on this node, or may be.

    Args:
        members: the ranks of this node.
        folder: the folder to meet in if the store cannot be reached.
    """
    size = max((member.world_size for member in members), default=0)
    if size <= len(members):
        return []
    # Some boxes are not here although all ranks have joined: those ranks are on another node, or in
    # another container of this host.
    elsewhere = have_joined(members)
    of_agent, method = _agent_serves_store(members), _init_method(members)
    if not of_agent and method is None and not elsewhere:
        return []  # the ranks may still meet in a file, although MASTER_ADDR is set
    is_file = method is not None and method.startswith("file:")
    meeting = None if is_file else meeting_of(members)
    found: list[Place] = []
    name = method or _job(members)
    if meeting is not None:
        name = f"{meeting.host}:{meeting.port}"
        if elsewhere or meeting.node_size != meeting.world_size:
            found += _store(meeting.host, meeting.port, of_agent=of_agent)
    if folder is not None and (elsewhere or found):
        digest = hashlib.sha256(f"{name} {size}".encode()).hexdigest()[:16]
        found.append(Folder(folder / f".commlens-nodes-{digest}"))
    return found


def _store(host: str, port: str, *, of_agent: bool) -> list[Place]:
    """Return the store as the only place; none if its port is no number."""
    return [Store(host, int(port), of_agent)] if port.isdecimal() else []


def _agent_serves_store(members: Sequence[Member]) -> bool:
    here = next((member for member in members if member.here and member.alive), None)
    return (
        here is not None
        and process.environment(here.pid).get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def _init_method(members: Sequence[Member]) -> str | None:
    """Return the ``init_method`` that a rank passed to ``init_process_group``: an address or a
    file; "" if it passed none; None if no call is recorded.
    """
    for box in [member.box for member in members if member.box is not None]:
        with contextlib.suppress(FormatError):
            for op in box.log(newest=1).setups:
                if op.op == "init_process_group":
                    return op.module or ""
    return None


def _job(members: Sequence[Member]) -> str:
    """Return the job's name. Without the store's address, it is all that the nodes may have in
    common.
    """
    return next((member.box.path.parent.name for member in members if member.box is not None), "")
