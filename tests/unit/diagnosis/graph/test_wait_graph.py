"""Sinks and cycles of the graph of who waits for whom."""

from __future__ import annotations

from typing import Any

from commlens.diagnosis.graph.wait_graph import Edge, Graph, Instance, WaitNode, shortest_cycle

OP: Any = None
AT = WaitNode("at", detail=0)


def waits(rank: int) -> WaitNode:
    return WaitNode("wait", rank)


def graph_of(*edges: tuple[WaitNode, WaitNode]) -> Graph:
    graph = Graph()
    for source, target in edges:
        graph.add(source, target, Edge(OP, Instance(("0", "cpu", (0, 1, 2)), 1), source.rank))
    return graph


def test_of_a_chain_the_end_is_the_sink() -> None:
    absent = WaitNode("absent", 2)
    graph = graph_of((waits(0), waits(1)), (waits(1), absent))
    assert graph.sinks() == [absent]
    assert graph.reaching([absent]) == {waits(0), waits(1)}
    assert graph.find_cycles() == []
    graph.drop(waits(1), absent)
    assert graph.sinks() == []


def test_ranks_that_wait_in_a_collective_wait_for_those_that_have_not_come() -> None:
    absent = WaitNode("absent", 2)
    graph = graph_of((waits(0), AT), (waits(1), AT), (AT, absent))
    assert [edge.rank for edge in graph.edges_into(absent)] == [0, 1]
    assert graph.reaching([absent]) == {waits(0), waits(1), AT}


def test_a_cycle_that_no_edge_leaves_is_found() -> None:
    ring = [(waits(0), waits(1)), (waits(1), waits(2)), (waits(2), waits(0))]
    graph = graph_of(*ring, (waits(3), waits(0)))
    assert graph.find_cycles() == [[waits(0), waits(1), waits(2)]]
    graph.add(waits(1), WaitNode("absent", 9), graph.edges[waits(1)][waits(2)])
    graph.add(waits(1), waits(4), graph.edges[waits(1)][waits(2)])
    graph.add(waits(4), WaitNode("dead", 8), graph.edges[waits(1)][waits(2)])
    assert graph.find_cycles() == [], "rank 1 waits for others, too"


def test_the_shortest_of_several_cycles() -> None:
    graph = graph_of(
        (waits(0), waits(1)),
        (waits(1), waits(2)),
        (waits(2), waits(0)),
        (waits(1), waits(0)),
    )
    (component,) = graph.find_cycles()
    cycle = shortest_cycle(graph, component)
    assert [(one.rank, other.rank) for one, other, _ in cycle] == [(0, 1), (1, 0)]
