"""*Strangers*: ranks of a job on this node that no black box records, found by the environment of
their processes, and why they are not recorded.

A process is a rank of the job if its ``MASTER_ADDR``, ``MASTER_PORT`` and ``WORLD_SIZE`` are those
by which the recorded ranks met.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from commlens import launchers
from commlens.errors import FormatError
from commlens.model.collective import Collective, Frame, user_frame
from commlens.model.frames import frame_kind
from commlens.model.grouping import grouped
from commlens.model.limits import LOOPBACK
from commlens.model.ops import STORE_CLIENT
from commlens.model.ranklog import RankLog
from commlens.model.store_identity import StoreAddress, parse_address
from commlens.model.worlds import NearProcess
from commlens.processes import process, pyspy
from commlens.processes.connections import links_between
from commlens.processes.observer import Observer
from commlens.processes.ranks import (
    RankProcess,
    ancestors_of,
    one_of_each,
    python_processes,
    rank_process,
)
from commlens.text import ranks_phrase
from commlens.watch.roster import Member, Roster

_LOOK_EVERY_S = 2.0
_NEAR_MAX = 4
_LINES_AFTER_S = 2.0  # on gloo, all ranks leave init_process_group at about the same time
_IMPORTS_WITHIN_S = 30.0  # on NCCL, a rank leaves it while others still import torch


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
        if meeting is None:
            return False
        restart = max(member.restart for member in members)
        found = find_strangers(meeting, {member.rank for member in members}, restart)
        for worker in found:
            self._roster.add_worker(worker)
            self._observer.add(worker.pid, worker.start_ticks)
        return bool(found)

    def lines_at_start(self, now: float) -> list[str]:
        """Name the ranks of this node that are not recorded: once, soon after a rank has left
        init_process_group.
        """
        has_joined = any(
            member.status is not None and member.status.initialised and member.alive
            for member in self._roster.current()
        )
        if self._said or not has_joined:
            return []
        self._lines_due = self._lines_due or now + _LINES_AFTER_S
        if now < self._lines_due:
            return []
        self.find(now)
        members, self._lines_due = self._roster.current(), now + _LOOK_EVERY_S
        lines = unrecorded_lines(members)
        self._said = bool(lines) or not any(map(_may_open_one, members))
        return lines


class JobMeeting(NamedTuple):
    """Where the ranks of a job meet, and how many they are."""

    host: str
    port: str
    world_size: int
    node_size: int  # ranks on this node; 0 if unknown
    # what the ranks of a node have in common in their environment, if they have it
    node: tuple[str, ...] = ("", "", "", "")


def meeting_of(members: Sequence[Member]) -> JobMeeting | None:
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
            place = next(filter(None, map(meeting_address, setups)), None)
            host, port = place or (host, port)
        size = launchers.number(environ, [launchers.LOCAL_WORLD_SIZE], 0)
        if port and member.world_size:
            return JobMeeting(host, port, member.world_size, size, _node(environ))
    return None


def meeting_address(op: Collective) -> StoreAddress | None:
    """Return the host and port at which ``init_process_group`` meets the other ranks, or a
    ``TCPStore`` waits for its server; None for other calls, and if it meets them otherwise.
    """
    if op.op == STORE_CLIENT:
        return parse_address(op.channel.group.name)
    address = parse_address(op.module if op.op == "init_process_group" else "")
    return address if address.port else None


def find_strangers(meeting: JobMeeting, known: Collection[int], restart: int) -> list[RankProcess]:
    """Return the processes of this user and node that their environment makes ranks of the job,
    without the ranks that are known.
    """
    found: list[RankProcess] = []
    for pid, environ in python_processes():
        # PyTorch Lightning sets the ranks of the first node only
        names = ["RANK", *(["LOCAL_RANK"] if environ.get("NODE_RANK", "0") == "0" else [])]
        one = rank_process(pid, environ, names) if _is_of_job(environ, meeting) else None
        if one is not None and one.rank not in known:
            size = meeting.world_size
            found.append(RankProcess(one.rank, pid, one.start_ticks, size, restart=restart))
    return one_of_each(found)


def _is_of_job(environ: Mapping[str, str], meeting: JobMeeting) -> bool:
    """Return whether a process with this environment is in the job that meets there, and on this
    node of it.
    """
    if environ.get("MASTER_PORT") != meeting.port:
        return False
    hosts = {environ.get("MASTER_ADDR") or meeting.host, meeting.host}
    # two names that are no loopback: ranks of another job
    same_job = environ.get("WORLD_SIZE") == str(meeting.world_size) and (
        len(hosts) == 1 or hosts & LOOPBACK
    )
    return bool(same_job) and all(
        "" in pair or pair[0] == pair[1] for pair in zip(_node(environ), meeting.node, strict=True)
    )


def _node(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Two launchers on one machine may be two nodes of a job, or have two jobs."""
    return tuple(
        environ.get(name, "")
        for name in ("GROUP_RANK", "NODE_RANK", "COMMLENS_BOX_DIR", "SLURM_JOB_ID")
    )


def near_processes(logs: Sequence[RankLog]) -> tuple[NearProcess, ...]:
    """Return the processes of this host that have no log, and are connected with ranks in whose
    groups members are not known, each with the line where it stands.
    """
    here = {log.pid: log for log in logs if log.host == os.uname().nodename}
    unknown = {each.number for each in logs[0].worlds.outsiders if each.size}
    members = {
        pid: log.rank
        for pid, log in here.items()
        if any(unknown.intersection(op.channel.group.ranks) for op in log.setups + log.collectives)
    }
    links = links_between([*members, *_unrelated({*here})] if members else ())
    ends = [end for link in links for end in (link, link[::-1])]
    found = grouped((pid, members[end]) for pid, end in ends if end in members)
    return tuple(
        NearProcess(
            pid,
            process.script_of(process.command_line(pid)),
            tuple(found[pid]),
            process.keeps_box(pid),
            _line_of(pid),
        )
        for pid in sorted(found.keys() - members)[:_NEAR_MAX]
    )


def _unrelated(recorded: set[int]) -> list[int]:
    """Return the processes with torch that are not recorded, nor parents or children of these."""
    above = {pid for each in recorded for pid in ancestors_of(each)}
    return [
        pid
        for pid, _ in python_processes()
        if pid not in above and recorded.isdisjoint(ancestors_of(pid)) and process.has_torch(pid)
    ]


def _line_of(pid: int) -> Frame | None:
    return next(
        (
            user_frame(each.stack.frames)
            for each in pyspy.take(pid, lambda file: frame_kind(file, [])).threads
        ),
        None,
    )


def why_unrecorded(pid: int, *, joined: bool) -> str:
    """Return why a process keeps no black box, and what to do, in a clause; empty if it may still
    open one.

    Args:
        pid: of a rank.
        joined: the job's ranks have left init_process_group.
    """
    if not process.has_torch(pid):
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
    meeting = meeting_of(recorded)
    size = meeting.world_size if meeting is not None else 0
    if meeting is None or len(recorded) >= size:
        return []
    lines = list(_unrecorded(members, recorded))
    absent = sorted(set(range(size)) - {member.rank for member in members})
    all_here = meeting.host in LOOPBACK and meeting.node_size in (0, size)
    if absent and all_here and not lines:
        lines.append(f"no process of {ranks_phrase(absent)} was found on this node")
    return [f"{len(recorded)} of {size} ranks are recorded: {'; '.join(lines)}."] if lines else []


def _unrecorded(members: Sequence[Member], recorded: Sequence[Member]) -> Iterator[str]:
    """Yield a clause with the reason for each rank that runs and will never be recorded."""
    for member in members:
        is_unrecorded = member.box is None and member.alive
        joined = not _may_open_one(member)
        if is_unrecorded and (why := why_unrecorded(member.pid, joined=joined)):
            parent = parent_among(member.pid, recorded)
            child = f" is a child of rank {parent.rank} and" if parent is not None else ""
            yield f"rank {member.rank} (pid {member.pid}){child} is not recorded: {why}"


def _may_open_one(member: Member) -> bool:
    """Return whether a rank without a black box may still import torch, which opens it."""
    return member.box is None and member.alive and process.age_s(member.pid) < _IMPORTS_WITHIN_S


def parent_among(pid: int, members: Sequence[Member]) -> Member | None:
    """Return the member that is the nearest ancestor of a process."""
    by_pid = {member.pid: member for member in members}
    return next((by_pid[each] for each in ancestors_of(pid)[1:] if each in by_pid), None)
