"""Nodes that have fallen silent, as evidence for the diagnosis of those that remain; and the line
on a store that was lost, through which nodes saw each other.

A silent node has *vanished*, with all its ranks, if connections to its ranks were closed at the
same moment. Silence alone shows nothing: the network may be cut, or only the watcher was killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from commlens.errors import FormatError
from commlens.matching.error_texts import is_closed_connection
from commlens.model.cause import LostNode
from commlens.model.collective import State
from commlens.model.grouping import grouped
from commlens.model.ranklog import End, Observation, RankLog
from commlens.text import joined, op_phrase, ranks_phrase, verb
from commlens.watch.nodes.known_nodes import Lost
from commlens.watch.nodes.nodes_in_sight import LostStore, NodesInSight
from commlens.watch.roster import Member

_SAME_MOMENT_S: Final = 3.0
# after which a store that refuses connections is reported: ranks that end with it need no report
ENDED_S: Final = 2.5
SILENT_S: Final = 12.0  # after which a store that only does not answer is: it may be busy
_NEWEST: Final = 8  # records that show where a rank is


def find_vanished(silent: Sequence[Lost], logs: Sequence[RankLog]) -> list[Lost]:
    """Return the nodes that have vanished.

    Args:
        silent: the nodes that are silent.
        logs: of all ranks whose evidence is known.
    """
    now_ns = time.time_ns()
    closed_ago_s = [
        (now_ns - moment) / 1e9 for moment in map(_connection_closed_ns, logs) if moment
    ]
    return [
        node
        for node in silent
        if node.by_itself
        and any(
            # Its last value may be up to one reading period older than when it was read, and the
            # node may have lived as long after its last value.
            abs(ago - node.silent_s) < _SAME_MOMENT_S + 2 * node.read_every_s
            for ago in closed_ago_s
        )
    ]


def logs_of_vanished(
    nodes: Sequence[Lost], logs: Sequence[RankLog], first: int = 0
) -> list[RankLog]:
    """Return a log for each rank of the vanished nodes that has none in ``logs``; it says that the
    rank is gone. ``first`` is the number of the job's rank 0 in these.
    """
    known = {log.rank for log in logs}
    found: list[RankLog] = []
    for node in nodes:
        last_ns = time.time_ns() - int(node.silent_s * 1e9)
        found += [
            RankLog(
                rank=first + rank,
                world_size=node.beat.world_size,
                host=node.beat.host,
                captured_ns=last_ns,
                initialised=True,
                observation=Observation(end=End.GONE, ended_ns=last_ns),
            )
            for rank in node.beat.ranks
            if first + rank not in known
        ]
    return found


def as_evidence(silent: Sequence[Lost], vanished: Sequence[Lost], first: int = 0) -> list[LostNode]:
    """Return the silent nodes in the form that the diagnosis reads.

    Args:
        silent: the nodes that are silent.
        vanished: those of them that have vanished.
        first: the number of the job's rank 0 in the diagnosis.
    """
    return [
        LostNode(
            node.beat.host,
            [first + rank for rank in node.beat.ranks],
            node.silent_s,
            node in vanished,
        )
        for node in silent
    ]


def _connection_closed_ns(log: RankLog) -> int:
    """Return when a rank's collective failed because the other side closed the connection (Unix
    ns); 0: none did.
    """
    for op in reversed(log.collectives):
        if op.state is State.FAILED and is_closed_connection(op.error):
            return op.ended_ns
        if op.state is State.COMPLETED:
            break
    return log.observation.ended_ns if is_closed_connection(log.exception) else 0


class LostStoreReport:
    """Reports the loss of the job's store, once, if ranks of this node still communicate."""

    def __init__(self) -> None:
        self._issued: dict[int, int] = {}  # records when the store was lost, by pid
        self._is_reported = False

    def take_line(self, nodes: NodesInSight, members: Sequence[Member]) -> str:
        """Return the line if it is time to print it; else an empty text."""
        lost = nodes.lost_store
        if lost is None or self._is_reported:
            self._issued = {}
            return ""
        alive = [member for member in members if member.alive and member.status is not None]
        for member in alive:
            if member.status is not None:
                self._issued.setdefault(member.pid, member.status.issued)
        is_due = lost.silent_s >= (ENDED_S if lost.refuses else SILENT_S)
        if not is_due or not any(map(self._communicates, alive)):
            return ""
        self._is_reported = True
        return lost_store_line(lost, alive)

    def _communicates(self, member: Member) -> bool:
        """Return whether a rank waits, or has gone on since the store was lost. One that has
        destroyed its groups has ended well.
        """
        status = member.status
        if status is None or status.left or status.closed:
            return False
        waits = status.oldest_mono_ns and time.monotonic_ns() - status.oldest_mono_ns > 1e9
        return bool(waits) or status.issued > self._issued[member.pid]


def lost_store_line(lost: LostStore, members: Sequence[Member]) -> str:
    """Return what is known, in sentences: who served the store, of whom nothing is known from here
    on, and where the ranks here are.
    """
    beats = sorted(lost.beats, key=lambda beat: beat.order)
    server = next((beat for beat in beats if beat.serves_store or 0 in beat.ranks), None)
    served = (
        f", which node {server.host} ({ranks_phrase(server.ranks)}) served,"
        if server is not None
        else ""
    )
    how = (
        "has ended: it refuses connections"
        if lost.refuses
        else f"has not answered for {lost.silent_s:.0f} s"
    )
    text = (
        f"{lost.place}{served} {how}. Nothing is known any more of"
        f" {ranks_phrase(rank for beat in beats for rank in beat.ranks)}"
    )
    text += f" on {joined(f'{beat.host}' for beat in beats)}."
    where = grouped((_place(member), member.rank) for member in members)
    here = [
        f"{ranks_phrase(ranks)} {verb(ranks, 'is', 'are')} {place}"
        for place, ranks in where.items()
        if place
    ]
    return f"{text} Here, {joined(here)}."


def _place(member: Member) -> str:
    try:
        op = member.box.log(newest=_NEWEST).current_collective if member.box is not None else None
    except FormatError:
        op = None
    return "" if op is None else f"{'in' if op.in_flight else 'past'} {op_phrase(op)}"
