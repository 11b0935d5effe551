"""Nodes that have fallen silent, in the verdict of those that remain.

A node has vanished if its watcher is silent and connections to its ranks were closed at the same
moment. Silence alone shows nothing: the network may be cut, or only the watcher was killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from commlens.matching.error_texts import is_closed_connection
from commlens.model.collective import State
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Finding, Verdict
from commlens.text import joined, ranks_phrase, verb
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
        if node.by_itself and any(abs(ago - node.silent_s) < _SAME_MOMENT_S for ago in closed_s)
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


def name_lost_nodes(verdict: Verdict, lost: Sequence[Lost], gone: Sequence[Lost]) -> Verdict:
    """Return a verdict that names the lost nodes, and blames none of the ranks of which nothing is
    known.

    Args:
        verdict: of the evidence of the other nodes.
        lost: the nodes that are silent.
        gone: those of them that have vanished.
    """
    silent = [node for node in lost if node not in gone]
    findings = [_with_silent(_with_vanished(finding, gone), silent) for finding in verdict.findings]
    if findings == verdict.findings:
        return verdict
    return Verdict.from_findings(
        findings, looked_at=verdict.looked_at, missing_evidence=verdict.missing_evidence
    )


def _with_vanished(finding: Finding, gone: Sequence[Lost]) -> Finding:
    nodes = [node for node in gone if set(node.beat.ranks) & set(finding.culprits)]
    if finding.kind != "dead" or not set(finding.culprits) <= _ranks(nodes) or not nodes:
        return finding
    _, separator, victims = finding.summary.rpartition("; rank")
    hosts = joined(node.beat.host for node in nodes)
    return msgspec.structs.replace(
        finding,
        summary=f"{_names(nodes)} vanished{separator}{victims if separator else ''}",
        explanation=(
            f"The watcher of {hosts} fell silent {min(node.silent_s for node in nodes):.0f} s ago,"
            " when the connections to the ranks there were closed: the processes there ended, all"
            " at once or with the machine."
        ),
        next_step=(
            f"look at the scheduler's log and at dmesg of {hosts}: was the machine lost, or were"
            " all processes there killed?"
        ),
    )


def _with_silent(finding: Finding, silent: Sequence[Lost]) -> Finding:
    group = finding.group.ranks if finding.group is not None else []
    nodes = [node for node in silent if set(node.beat.ranks) & set(group)]
    if finding.kind != "missing" or not nodes or not set(finding.culprits) <= _ranks(nodes):
        return finding
    wait = finding.summary.partition(", like all ranks with a record")[0]
    hosts = joined(node.beat.host for node in nodes)
    return msgspec.structs.replace(
        finding,
        culprits=[],
        confidence="low",
        would_raise_confidence=(
            "Whether the machine, the connection or only commlens's watcher is lost does not show"
            " from here."
        ),
        summary=f"{wait}; {_names(nodes)} no longer {verb(range(len(nodes)), 'answers', 'answer')}",
        next_step=(
            f"look at {hosts} and the network: a machine is lost, or the connection to it, or only"
            " commlens's watcher there. If its ranks still run, `commlens dump` there shows what"
            " they do"
        ),
    )


def _ranks(nodes: Sequence[Lost]) -> set[int]:
    return {rank for node in nodes for rank in node.beat.ranks}


def _names(nodes: Sequence[Lost]) -> str:
    names = joined(f"{node.beat.host} ({ranks_phrase(node.beat.ranks)})" for node in nodes)
    return f"{'node' if len(nodes) == 1 else 'nodes'} {names}"


def _connection_closed_ns(log: RankLog) -> int:
    """Return when a rank's collective failed because the other side closed the connection (Unix
    ns); 0: none did.
    """
    for op in reversed(log.collectives):
        if op.state is State.FAILED and is_closed_connection(op.error):
            return op.done_ns or op.wait_ended_ns or op.returned_ns
        if op.state is State.COMPLETED:
            break
    return log.observation.ended_ns if is_closed_connection(log.exception) else 0
