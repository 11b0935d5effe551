"""Nodes that have fallen silent, as evidence for the diagnosis of those that remain.

A node has vanished if its watcher is silent and connections to its ranks were closed at the same
moment. Silence alone shows nothing: the network may be cut, or only the watcher was killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from commlens.matching.error_texts import is_closed_connection
from commlens.model.cause import LostNode
from commlens.model.collective import State
from commlens.model.ranklog import End, Observation, RankLog
from commlens.watch.nodes.known_nodes import Lost

_SAME_MOMENT_S: Final = 3.0


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
