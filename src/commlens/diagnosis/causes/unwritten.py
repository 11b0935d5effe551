"""Keys of the job's store that ranks wait for and no rank writes."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.causes.context import MOTIONLESS, Context, waits_of
from commlens.diagnosis.graph.store_keys import writes_of_kind
from commlens.diagnosis.graph.wait_graph import Edge, Node
from commlens.model.cause import Unwritten
from commlens.model.collective import Collective


@dataclass
class FoundUnwritten:
    """A key that no rank writes, and the evidence."""

    cause: Unwritten
    edges: list[Edge]  # the waits for it
    blocked: list[int]  # ranks that wait for it, directly or behind others
    involved: list[int]  # ranks that wait for it, or for one another
    write: Collective | None = None  # the culprit's first one of such a key
    own: Collective | None = None  # in which the culprit waits for these ranks


def find_skipped_writes(context: Context) -> None:
    """Find the cycles in which ranks wait for a key, and the rank that wrote such keys before waits
    for these ranks.

    That rank is to blame if most of the ranks in the cycle wait for the key. Otherwise these may be
    where they should not be.
    """
    graph, left = context.graph, []
    for component in graph.deadlocks:
        waits = [node for node in component if node.kind == "wait"]
        held = [node for node in waits if graph.blocks[node].op.is_store_wait]
        writers = {target.rank for node in held for target in graph.edges[node]}
        edges = [edge for node in held for edge in graph.edges[node].values()]
        wrote = writes_of_kind(context.job, edges[0].op) if edges else {}
        is_one = (
            len(writers) == 1
            and len({edge.instance for edge in edges}) == 1
            and writers <= wrote.keys()
        )
        if is_one and len(held) > len(waits) - len(held):
            writer = writers.pop()
            _skipped_write(context, writer, wrote[writer], waits, edges)
        else:
            left.append(component)
    graph.deadlocks = left


def _skipped_write(
    context: Context, writer: int, write: Collective, waits: list[Node], edges: list[Edge]
) -> None:
    op, ranks = edges[0].op, sorted({node.rank for node in waits})
    own = next(context.graph.blocks[node].op for node in waits if node.rank == writer)
    blocked = context.blocked_by(waits)
    cause = Unwritten(
        kind="missing",
        why="skipped",
        root_cause=True,
        culprits=[writer],
        blamed_by="routine",
        victims=sorted({*ranks, *blocked} - {writer}),
        confidence="medium",
        certain=True,
        key=op.channel.group.name,
        ranks=sorted({edge.rank for edge in edges}),
        waits=waits_of(context, edges),
        written_before=True,
    )
    found = FoundUnwritten(cause, edges, blocked, ranks, write, own)
    context.add(found, op, write.source, blocked=len({*ranks, *blocked}))


def find_unwritten(context: Context, nodes: list[Node]) -> None:
    """Find the keys that ranks wait for where the records do not show who should write them. Nobody
    is blamed.

    If all ranks wait like that, a process outside of the job may be meant to write the key, so they
    must have waited for long.
    """
    edges_of = {node: context.graph.edges_into(node) for node in nodes}
    waiting = {edge.rank for edges in edges_of.values() for edge in edges}
    if len(waiting) == context.job.size and not context.waits_too_long(
        waiting, timeouts=MOTIONLESS
    ):
        return
    for node, edges in edges_of.items():
        op, ranks = edges[0].op, sorted({edge.rank for edge in edges})
        blocked = context.blocked_by([node])
        cause = Unwritten(
            kind="missing",
            why="unknown",
            root_cause=True,
            blamed_by="undecided",
            victims=sorted({*ranks, *blocked}),
            confidence="low",
            key=op.channel.group.name,
            ranks=ranks,
            waits=waits_of(context, edges),
            written_before=False,
        )
        found = FoundUnwritten(cause, edges, blocked, sorted(waiting))
        context.add(found, op, op.source, blocked=len(blocked))
