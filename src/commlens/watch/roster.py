"""The processes of a job on this node, found by their black boxes or as children of the launcher,
and watched for their end.

torchelastic may restart the workers: then new processes get the ranks of former ones. All processes
that were started together are one *generation*; :meth:`Roster.current` are the newest one's.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import BoxStatus, OpenBox
from commlens.errors import FormatError
from commlens.processes import process
from commlens.processes.early_handles import EarlyHandles
from commlens.processes.ranks import RankProcess, rank_process

RESTART_TICKS: Final = 100
"""Clock ticks of 10 ms. The workers of a node start within this time, and those that replace them
later.
"""


Workers = Callable[[], list[RankProcess]]
"""Returns the ranks that a launcher sees, even those that have no box yet or never get one."""


@dataclass(eq=False)
class Member:
    """One rank's process."""

    pid: int
    start_ticks: int
    rank: int
    world_size: int
    local_rank: int | None
    restart: int  # torchelastic's restart count
    handle: process.Handle
    here: bool = True  # visible from here: same host, same pid namespace
    box: OpenBox | None = None
    status: BoxStatus | None = None
    ending: process.ProcessEnding | None = None  # once it has ended
    ended_ns: int = 0  # Unix ns at which its end was noticed
    unreadable: str | None = None  # why its box cannot be read
    local_size: int = 0  # number of ranks on this node, from the launcher; 0: unknown
    generation: int = 0  # how often this node's workers had been replaced when it started

    @classmethod
    def of(
        cls, known: RankProcess | BoxStatus, handle: process.Handle, *, here: bool = True
    ) -> Member:
        """Return the member that a launcher or a box describes."""
        return cls(
            known.pid,
            known.start_ticks,
            known.rank,
            known.world_size,
            known.local_rank,
            known.restart,
            handle,
            here,
        )

    @property
    def alive(self) -> bool:
        """Whether it is not known to have ended."""
        return self.ending is None

    @property
    def ended_well(self) -> bool | None:
        """Whether it ended with status 0, or after its last group was destroyed; without a status,
        what its box says; None: unknown.
        """
        if self.ending is None:
            return None
        if self.ending.signal is not None:
            return False
        if self.ending.exit_code:
            return self.status is not None and self.status.left and not self.raised_before_its_end
        return self.said_goodbye if self.ending.exit_code is None else True

    @property
    def said_goodbye(self) -> bool | None:
        """True if its box was closed or its last group destroyed, False if its box says that an
        uncaught exception ended it; None if neither.
        """
        if self.status is None:
            return None
        if self.raised_before_its_end:
            return False
        return (
            not self.status.closed_by_exception if self.status.closed or self.status.left else None
        )

    @property
    def raised_before_its_end(self) -> bool:
        """Whether it was ended after an exception and before its exit handlers ran. Ray destroys
        the groups of such workers, too.
        """
        return (
            not self.alive
            and self.status is not None
            and self.status.exception != 0
            and not self.status.closed
        )


def _is_of_restart(known: Sequence[Member], new: Member) -> bool:
    """Return whether a process was started again after these had ended."""
    started = max(member.start_ticks for member in known)
    if any(member.rank == new.rank for member in known):
        return new.start_ticks > started
    beside = any(_lived_beside(member, new) for member in known)
    return not beside and new.start_ticks > started + RESTART_TICKS


def _lived_beside(member: Member, new: Member) -> bool:
    """Return whether a process was alive when another one made its box: Ray starts the workers of a
    job one by one, and all may have ended when they are seen.
    """
    return (
        member.status is not None
        and new.status is not None
        and member.status.heartbeat_mono_ns > new.status.created_mono_ns
    )


@dataclass
class Roster:
    """All members, and those of the current generation.

    torchelastic counts a restart only on the node whose workers failed, although it restarts those
    of all nodes. So a process also begins a new generation if all others had ended before.
    """

    # of the job's boxes; several where a rank takes the first in which it can write
    folders: Sequence[Path]
    workers: Workers | None = None
    early: EarlyHandles | None = None  # handles opened before this roster existed
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        # a write to wake_fileno ends wait(), which returns the bytes
        self._wake_read, self.wake_fileno = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._seen: dict[Path, int] = {}  # when each folder had changed that was read
        self._refused: set[Path] = set()  # boxes that cannot be read
        self._host = os.uname().nodename
        self._workers_at = 0.0  # time.monotonic() at which the launcher was asked last
        self._shown: int | None = None  # the generation that is current; None: the newest
        # dropped when a member is added, removed or gets its rank
        self._current: list[Member] | None = None
        self._ready: set[int] = set()  # descriptors that the last wait returned

    def refresh(self) -> list[Member]:
        """Find new processes and new boxes. Returns the new members."""
        if self.early is not None:
            self.early.stop()
        return [
            member for folder in self.folders for member in self._from_boxes(folder)
        ] + self._from_workers()

    def _from_boxes(self, folder: Path) -> list[Member]:
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return []
        if changed == self._seen.get(folder):
            return []
        new: list[Member] = []
        for path in job_dirs.boxes(folder):
            if path in self._refused or any(
                member.box is not None and member.box.path == path for member in self.members
            ):
                continue
            try:
                box = OpenBox(path)
                status = box.status()
            except FormatError:
                self._refused.add(path)
                continue
            here = (
                status.host in ("", self._host)
                and job_dirs.Machine(status.boot_id, status.pid_namespace).is_here
            )
            known = self.find(status.pid, status.start_ticks) if here else None
            member = known or Member.of(status, self._handle_of(status, here=here), here=here)
            member.box, member.status = box, status
            if known is None:
                new.append(self._add(member))
        self._seen[folder] = changed
        return new

    def _handle_of(self, status: BoxStatus, *, here: bool) -> process.Handle:
        """Return a handle on the process of a box: the one that was opened early, if there is one,
        since the process may have ended in between.
        """
        if not here:
            return process.Handle.invisible(status.pid)
        early = self.early.take(status.pid, status.start_ticks) if self.early is not None else None
        return early or process.Handle(status.pid, status.start_ticks)

    def _from_workers(self) -> list[Member]:
        if self.workers is None or time.monotonic() - self._workers_at < 0.1:
            return []
        self._workers_at = time.monotonic()
        return [
            self.add_worker(worker)
            for worker in self.workers()
            if self.find(worker.pid, worker.start_ticks) is None
        ]

    def add_worker(self, worker: RankProcess) -> Member:
        """Add a process that has no box, or none yet."""
        member = Member.of(worker, process.Handle(worker.pid, worker.start_ticks))
        member.local_size = worker.local_size
        return self._add(member)

    def find(self, pid: int, start_ticks: int) -> Member | None:
        """Return the process of this node with this pid and start time; 0 means that the start is
        unknown.
        """
        return next(
            (
                m
                for m in self.members
                if m.here
                and m.pid == pid
                and (0 in (m.start_ticks, start_ticks) or m.start_ticks == start_ticks)
            ),
            None,
        )

    def _add(self, member: Member) -> Member:
        member.generation = self._generation_of(member)
        return self._append(member)

    def _append(self, member: Member) -> Member:
        self.members.append(member)
        self._current = None
        if member.handle.fileno is not None:
            self._poll.register(member.handle.fileno, select.POLLIN)
        return member

    def add_ended_worker(self, worker: RankProcess, ending: process.ProcessEnding) -> Member:
        """Add a process of the newest generation that ended before it was seen."""
        member = Member.of(worker, process.Handle.invisible(worker.pid))
        member.ending, member.ended_ns, member.generation = ending, time.time_ns(), self.generation
        return self._append(member)

    @property
    def generation(self) -> int:
        """The newest generation."""
        return max((member.generation for member in self.members), default=0)

    def _generation_of(self, new: Member) -> int:
        """Return the generation of a new process.

        If torchelastic's count of restarts differs from that of the newest generation, it tells:
        the next one, or the one before for a late process. With the same count it is the newest
        generation, unless all of that one had ended when the process started.
        """
        known = [member for member in self.members if member.generation == self.generation]
        if not known:
            return self.generation
        if new.restart != known[0].restart:
            return self.generation + (1 if new.restart > known[0].restart else -1)
        if any(
            member.alive and (not member.here or member.handle.ending() is None) for member in known
        ):
            return self.generation
        return self.generation + _is_of_restart(known, new)

    @contextlib.contextmanager
    def former_generation(self) -> Iterator[None]:
        """Inside, the generation before the newest is the current one."""
        self._shown, self._current = self.generation - 1, None
        try:
            yield
        finally:
            self._shown = self._current = None

    def current(self) -> list[Member]:
        """Return the newest process of each rank of the current generation, by rank."""
        if self._current is None:
            newest: dict[int, Member] = {}
            generation = self.generation if self._shown is None else self._shown
            for member in self.members:
                known = newest.get(member.rank)
                if member.generation == generation and (
                    known is None or member.start_ticks > known.start_ticks
                ):
                    newest[member.rank] = member
            self._current = [newest[rank] for rank in sorted(newest)]
        return self._current

    def read_headers(self) -> None:
        """Read the header of every living member's box."""
        for member in self.current():
            if member.box is None or not member.alive:
                continue
            try:
                member.status = member.box.status()
                if member.status.rank >= 0 and member.status.rank != member.rank:
                    member.rank, self._current = member.status.rank, None
                member.world_size = member.status.world_size or member.world_size
                member.unreadable = None
            except FormatError as error:
                member.unreadable = str(error)

    def wait(self, seconds: float) -> bytes:
        """Sleep until a process ends, :attr:`wake_fileno` is written to, or the time is over.
        Returns the bytes that were written.
        """
        self._ready = {fileno for fileno, _ in self._poll.poll(max(0, math.ceil(seconds * 1000)))}
        if self._wake_read in self._ready:
            self._workers_at = 0.0  # a rank that has just started may have sent a signal
            with contextlib.suppress(BlockingIOError):
                return os.read(self._wake_read, 4096)
        return b""

    @property
    def was_woken(self) -> bool:
        """Whether the last :meth:`wait` ended before its time was over."""
        return bool(self._ready)

    def take_ended(self) -> list[Member]:
        """Return the members that have ended, as of the last :meth:`wait`; each of them once."""
        ended: list[Member] = []
        for member in self.members:
            if not member.alive or not member.here:
                continue
            handle = member.handle
            if handle.exists and handle.fileno is not None and handle.fileno not in self._ready:
                continue
            ending = handle.ending()
            if ending is None:
                continue
            member.ending, member.ended_ns = ending, handle.ended_ns
            if handle.fileno is not None:
                self._poll.unregister(handle.fileno)
                handle.close()
            if member.box is not None:
                with contextlib.suppress(FormatError):
                    member.status = member.box.status()
            ended.append(member)
        return ended

    def forget(self, members: list[Member], *, remove_boxes: bool = False) -> None:
        """Drop members, for example those of a former generation."""
        for member in members:
            if member.handle.fileno is not None:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(member.handle.fileno)
                member.handle.close()
            if member.box is not None:
                if remove_boxes:
                    with contextlib.suppress(OSError):
                        job_dirs.remove_box(member.box.path)
                member.box.close()
            self.members.remove(member)
        self._current = None

    def close(self) -> None:
        """Close all handles and boxes. The pipe stays while anybody may write to it: its number
        could become another file's.
        """
        self.forget(list(self.members))
        if self.early is not None:
            self.early.close()

    def __del__(self) -> None:
        os.close(self._wake_read)
        os.close(self.wake_fileno)


def children_workers(parent: int) -> Workers:
    """Return a function that lists the ranks among a launcher's children, recognised by the
    environment that torchrun gives them.
    """
    known: dict[tuple[int, int], RankProcess | None] = {}

    def workers() -> list[RankProcess]:
        found: list[RankProcess] = []
        for pid in process.children(parent):
            seen = process.read_stat(pid)
            if seen is None:
                continue
            key = (pid, seen.start_ticks)
            if key not in known:
                environ = process.environment(pid)
                # Between fork and exec, a child has its parent's environment: try again later.
                if seen.ended or "RANK" not in environ or "TORCHELASTIC_RUN_ID" not in environ:
                    continue
                known[key] = rank_process(pid, environ, ["RANK"], stat=seen)
            if (worker := known[key]) is not None:
                found.append(worker)
        return found

    return workers
