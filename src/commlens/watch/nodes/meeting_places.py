"""The places where the watchers of a job's nodes can meet, and how values are kept there: the job's
own store, or a folder that the nodes share.

Both are used alike: :meth:`Store.open` and :meth:`Folder.open` return a client with ``set``,
``get``, ``existing_keys`` and ``add`` (of a counter).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commlens.errors import FormatError
from commlens.processes import process
from commlens.watch.nodes.beat import QUESTION, key
from commlens.watch.nodes.store_client import VALUE_MAX, KeepWaiting, StoreClient
from commlens.watch.roster import Member
from commlens.watch.snapshot import have_joined
from commlens.watch.strangers import JobMeeting, meeting_of

TIMEOUT_S: Final = 1.0  # for connecting
ANSWER_S: Final = 3.0  # for an answer, before the caller is asked whether to wait on
_NAME = re.compile(r"commlens-\d+[a-z0-9.-]*(\.\d+\.tmp)?")  # of a value's file
_COUNT_MAX = 100_000  # of a counter in a folder
_POLL_S = 1.0  # between two checks whether a key is set


class FolderClient:
    """Values in a folder: each key is one small file, which appears whole or not at all. The calls
    are those of :class:`StoreClient`.

    All methods raise OSError if the folder cannot be used.

    Args:
        folder: created if it does not exist, for this user only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "wb") as file:  # noqa: PTH123 - of the descriptor
            file.write(value)
        temporary.replace(path)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum. A counter at 3 is three empty
        files, ``KEY.0`` to ``KEY.2``; the number of questions of commands is a value of its own.

        Args:
            key: of the counter.
            amount: 0, 1, or :data:`QUESTION`.
        """
        asked = f"{key}.asked"
        questions = int(self.get([asked])[0]) if self.existing_keys([asked]) else 0
        if amount >= QUESTION:
            questions, amount = questions + 1, 0  # two that come at once count as one
            self.set(asked, b"%d" % questions)
        count = next(
            number for number in range(_COUNT_MAX) if not self._path(f"{key}.{number}").exists()
        )
        while amount:
            path = self._path(f"{key}.{count}")
            count += 1
            # if the file exists by now, another node has made it: take the next one
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                break
        return count + QUESTION * questions

    def existing_keys(self, keys: Sequence[str]) -> list[str]:
        """Return those of these keys that exist, with counters that are not 0."""
        names = {key: (key, f"{key}.0") for key in keys}
        return [key for key in keys if any(self._path(name).exists() for name in names[key])]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        values: list[bytes] = []
        for name in keys:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - of the descriptor
                values.append(file.read(VALUE_MAX))
        return values

    def wait_for(self, key: str, timeout_s: float, wake_fd: int) -> bool:
        """Wait until a key is set, and delete it: see
        :meth:`StoreClient.wait_for`.
        """
        end = time.monotonic() + timeout_s
        wake = select.poll()
        wake.register(wake_fd, select.POLLIN)
        while not self._path(key).exists():
            left = end - time.monotonic()
            if left <= 0 or wake.poll(1000 * min(left, _POLL_S)):
                return False
        self._path(key).unlink(missing_ok=True)
        return True

    def remove(self) -> None:
        """Delete all values, and the folder if it is then empty."""
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
        self._folder.rmdir()

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


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
    # Once a rank has joined, all have started: those without a box here are on another node, or in
    # another container of this host.
    are_elsewhere = have_joined(members)
    of_agent, method = _agent_serves_store(members), _init_method(members)
    if not of_agent and method is None and not are_elsewhere:
        return []  # the ranks may still meet in a file, although MASTER_ADDR is set
    is_file = method is not None and method.startswith("file:")
    meeting = None if is_file else meeting_of(members)
    found: list[Place] = []
    name = method or _job(members)
    if meeting is not None:
        name = f"{meeting.host}:{meeting.port}"
        if are_elsewhere or meeting.node_size != meeting.world_size:
            found += _store(meeting, of_agent=of_agent)
    if folder is not None and (are_elsewhere or found):
        digest = hashlib.sha256(f"{name} {size}".encode()).hexdigest()[:16]
        found.append(Folder(folder / f".commlens-nodes-{digest}"))
    return found


def _store(meeting: JobMeeting, *, of_agent: bool) -> list[Place]:
    """Return the store as the only place; none if its port is no number."""
    return [Store(meeting.host, int(meeting.port), of_agent)] if meeting.port.isdecimal() else []


def _agent_serves_store(members: Sequence[Member]) -> bool:
    """Return whether torchrun's agent serves the job's store, which then ends after the ranks."""
    pids = [member.pid for member in members if member.here and member.alive][:1]
    return any(
        process.environment(pid).get("TORCHELASTIC_USE_AGENT_STORE") == "True" for pid in pids
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
