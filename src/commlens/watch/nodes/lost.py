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

# a node that has been silent for this long while it was asked for evidence is not just slow
SILENT_S: Final = 2.0
_SAME_MOMENT_S: Final = 3.0


def vanished(lost: Sequence[Lost], logs: Sequence[RankLog]) -> list[Lost]:
    """Return the nodes that have vanished.

    Args:
        lost: the nodes that are silent.
        logs: of all ranks whose evidence is known.
    """
    now_ns = time.time_ns()
    closed_s = [(now_ns - moment) / 1e9 for moment in map(_connection_closed_ns, logs) if moment]
    return [
        node
        for node in lost
        if node.by_itself
        and any(
            # its last value may have been written before it was read, and it may have ended later
            abs(ago - node.silent_s) < _SAME_MOMENT_S + 2 * node.read_every_s
            for ago in closed_s
        )
    ]


def logs_of_vanished(nodes: Sequence[Lost], logs: Sequence[RankLog]) -> list[RankLog]:
    """Return logs that say that the ranks of vanished nodes are gone, as far as these ``logs`` do
    not know them.
    """
    known = {log.rank for log in logs}
    found: list[RankLog] = []
    for node in nodes:
        last_ns = time.time_ns() - int(node.silent_s * 1e9)
        found += [
            RankLog(
                rank=rank,
                world_size=node.beat.world_size,
                host=node.beat.host,
                captured_ns=last_ns,
                initialised=True,
                observation=Observation(end=End.GONE, ended_ns=last_ns),
            )
            for rank in node.beat.ranks
            if rank not in known
        ]
    return found


def as_evidence(lost: Sequence[Lost], gone: Sequence[Lost]) -> list[LostNode]:
    """Return the lost nodes in the form that the diagnosis reads.

    Args:
        lost: the nodes that are silent.
        gone: those of them that have vanished.
    """
    return [
        LostNode(node.beat.host, list(node.beat.ranks), node.silent_s, node in gone)
        for node in lost
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
