"""Ranks of a job on this node that no black box records, found by the environment of their
processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from commlens import launchers
from commlens.blackbox import job_dirs
from commlens.errors import FormatError
from commlens.processes import process
from commlens.processes.observer import Observer
from commlens.processes.process import has_torch
from commlens.text import ranks_phrase
from commlens.watch.roster import Member, Roster, Worker

_LOOK_EVERY_S = 2.0
_LINES_AFTER_S = 2.0  # all ranks leave init_process_group at about the same time
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "[::1]"})


class Strangers:
    """Finds the ranks on this node that keep no black box, and adds them to the roster, so that
    they are observed.
    """

    def __init__(self, roster: Roster, observer: Observer) -> None:
        self._roster = roster
        self._observer = observer
        self._looked_at = 0.0
        self._lines_due: float | None = None
        self._said = False

    def find(self, now: float) -> bool:
        """Look for ranks without a black box, at most every two seconds. Returns whether new ones
        were found.
        """
        members = self._roster.current()
        size = max((member.world_size for member in members), default=0)
        if now - self._looked_at < _LOOK_EVERY_S or len(members) >= size:
            return False
        self._looked_at = now
        meeting = meeting_of(members)
        restart = max(member.restart for member in members)
        found = (
            find_strangers(meeting, {member.rank for member in members}, restart)
            if meeting is not None
            else []
        )
        for worker in found:
            self._roster.adopt(worker)
            self._observer.add(worker.pid, worker.start_ticks)
        return bool(found)

    def lines_at_start(self, now: float) -> list[str]:
        """Name the ranks of this node that are not recorded: once, soon after a rank has left
        init_process_group.
        """
        if self._said:
            return []
        if not any(
            member.status is not None and member.status.initialised and member.alive
            for member in self._roster.current()
        ):
            return []
        self._lines_due = self._lines_due or now + _LINES_AFTER_S
        self._said = now >= self._lines_due
        if self._said:
            self.find(now)
        return unrecorded_lines(self._roster.current()) if self._said else []


class Meeting(NamedTuple):
    """Where the ranks of a job meet, and how many they are."""

    host: str
    port: str
    world_size: int
    node_size: int  # ranks on this node; 0 if unknown
    # what the ranks of a node have in common in their environment, if they have it
    node: tuple[str, ...] = ("", "", "", "")

    @property
    def is_on_this_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.host in _LOOPBACK and self.node_size in (0, self.world_size)


def meeting_of(members: Sequence[Member]) -> Meeting | None:
    """Return where the ranks meet, from a rank's note on init_process_group, else from its
    environment; None if unknown.
    """
    for member in members:
        environ = process.environment(member.pid) if member.here and member.alive else {}
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if member.box is not None:
            try:
                setups = member.box.log(newest=1).setups
            except FormatError:
                continue
            place = next(
                (op.module for op in setups if op.op == "init_process_group" and op.module), ""
            )
            if place.startswith("tcp://"):
                host, _, port = place.removeprefix("tcp://").partition("?")[0].rpartition(":")
        size = launchers.number(environ, [launchers.LOCAL_WORLD_SIZE], 0)
        if port and member.world_size:
            return Meeting(host, port, member.world_size, size, _node(environ))
    return None


def find_strangers(meeting: Meeting, known: Collection[int], restart: int) -> list[Worker]:
    """Return the processes of this user and node that their environment makes ranks of the job,
    without the ranks that are known.
    """
    found: dict[int, Worker] = {}
    candidates: dict[int, int] = {}  # pid: rank
    for pid in process.pids():
        if process.runs_python(pid):
            environ = process.environment(pid)
            hosts = {environ.get("MASTER_ADDR") or meeting.host, meeting.host}
            same_port = environ.get("MASTER_PORT") == meeting.port and environ.get(
                "WORLD_SIZE"
            ) == str(meeting.world_size)
            # two names that are no loopback: ranks of another job
            if same_port and (len(hosts) == 1 or hosts & _LOOPBACK):
                rank = _rank(environ)
                same_node = all(
                    "" in pair or pair[0] == pair[1]
                    for pair in zip(_node(environ), meeting.node, strict=True)
                )
                if rank >= 0 and rank not in known and same_node:
                    candidates[pid] = rank
    # A rank's own children have its environment, and perhaps so has a program that started it.
    for pid, rank in sorted(candidates.items(), key=lambda item: job_dirs.start_ticks(item[0])):
        better = found.get(rank)
        if better is None or (not has_torch(better.pid) and has_torch(pid)):
            found[rank] = Worker(
                rank, pid, job_dirs.start_ticks(pid), meeting.world_size, None, restart
            )
    return [found[rank] for rank in sorted(found)]


def _node(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Two launchers on one machine may be two nodes of a job, or have two jobs."""
    return tuple(
        environ.get(name, "")
        for name in ("GROUP_RANK", "NODE_RANK", "COMMLENS_BOX_DIR", "SLURM_JOB_ID")
    )


def _rank(environ: Mapping[str, str]) -> int:
    names = ["RANK", *(["LOCAL_RANK"] if environ.get("NODE_RANK", "0") == "0" else [])]
    return launchers.number(environ, names)


def why_unrecorded(pid: int, *, joined: bool) -> str:
    """Return why a process keeps no black box, and what to do, in a clause; empty if it may still
    open one.

    Args:
        pid: of a rank.
        joined: the job's ranks have left init_process_group.
    """
    if not has_torch(pid):
        return ""
    environ = process.environment(pid)
    if environ.get("COMMLENS", "").strip().lower() in ("", "0", "false", "no", "off"):
        return (
            "COMMLENS=1 is not in its environment: start it with COMMLENS=1, or with `commlens run`"
        )
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return (
            "TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from loading commlens: start it with"
            " `commlens run`"
        )
    if not joined:
        return ""
    return (
        "its Python may lack commlens, or recording failed: look at its output, and run `commlens"
        " doctor` with its Python"
    )


def unrecorded_lines(members: Sequence[Member]) -> list[str]:
    """Return what to say about a job of which this node does not record all ranks; nothing if the
    others may be on another node.
    """
    recorded = [member for member in members if member.box is not None]
    reasons = {
        m.rank: why
        for m in members
        if m.box is None and m.alive and (why := why_unrecorded(m.pid, joined=True))
    }
    meeting = meeting_of(recorded)
    size = meeting.world_size if meeting is not None else 0
    absent = sorted(set(range(size)) - {member.rank for member in members})
    if len(recorded) >= size or not (
        reasons or (absent and meeting is not None and meeting.is_on_this_node)
    ):
        return []
    lines = []
    for member in members:
        if member.rank in reasons:
            parent = parent_among(member.pid, recorded)
            child = f" is a child of rank {parent.rank}" if parent is not None else ""
            lines.append(
                f"rank {member.rank} (pid {member.pid}){child and f'{child} and'} is not recorded:"
                f" {reasons[member.rank]}"
            )
    if absent and not reasons:
        lines.append(f"no process of {ranks_phrase(absent)} was found on this node")
    return [f"{len(recorded)} of {size} ranks are recorded: {'; '.join(lines)}."]


def parent_among(pid: int, members: Sequence[Member]) -> Member | None:
    """Return the member that is the nearest ancestor of a process."""
    by_pid = {member.pid: member for member in members}
    for _ in range(64):
        pid = job_dirs.parent_of(pid)
        if pid <= 1:
            return None
        if pid in by_pid:
            return by_pid[pid]
    return None
