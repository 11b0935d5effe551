"""Ranks that wait, and nothing shows for which ranks."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.graph.wait_graph import Graph, Node
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import Unexplained
from commlens.model.collective import Collective


@dataclass
class FoundUnexplained:
    """Ranks that wait, and in which collectives."""

    cause: Unexplained
    ops: list[Collective]


def find_unexplained(job: JobIndex, graph: Graph) -> FoundUnexplained | None:
    """Return the ranks that are stuck for an unknown reason, or in too many different collectives,
    where nothing else was found; None if there are none.
    """
    waits = _unexplained_waits(graph)
    if not waits and not graph.incomplete:
        return None
    stuck = sorted({node.rank for node in waits})
    if graph.incomplete:
        stuck = [
            rank
            for rank, view in job.views.items()
            if not view.died and any(block.stuck for block in view.blocks.values())
        ]
    cause = Unexplained(
        kind="missing",
        why="unknown",
        root_cause=True,
        blamed_by="unknown",
        victims=stuck,
        confidence="low",
        ranks=stuck,
        too_many_waits=graph.incomplete,
    )
    return FoundUnexplained(cause, [graph.blocks[node].op for node in waits])


def _unexplained_waits(graph: Graph) -> list[Node]:
    """Return the stuck threads, except those that may go on: in a collective that all ranks have
    reached, or until a key is written.
    """
    explained = graph.reaching(
        node
        for node in graph.sinks()
        if node.kind == "key" or (node.kind == "stuck" and not graph.is_alone(node))
    )
    return sorted(node for node in graph.blocks if node not in explained)
