"""The wait-for graph: each blocked thread points to the threads or ranks that it waits for. Its
sinks and cycles are root causes.

A collective is a node of its own between the threads that wait in it and the ranks that it waits
for, so the number of edges is linear in the number of ranks, not quadratic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from commlens.diagnosis.index.job_index import Block
from commlens.model.collective import ChannelKey, Collective

_STARTS_MAX = 64  # threads from which a shortest cycle is searched


class Node(NamedTuple):
    """A blocked thread, a collective that threads wait in, or a sink: the end of their waiting.

    Kinds: ``"wait"``, a blocked thread; ``"at"``, a collective that some of its ranks have not
    reached. Sinks: ``"absent"``, a rank that is not blocked; ``"dead"``; ``"no-record"``;
    ``"elsewhere"``, a rank that probably runs on another node; ``"mismatch"``; ``"stuck"``, a
    collective or message that all its ranks have reached; ``"key"``, a key of the store of which it
    is not known who should write it.
    """

    kind: str
    rank: int = -1
    detail: int = 0  # thread, or index of the mismatch or instance


class Instance(NamedTuple):
    """One collective on all of its ranks, or one message. Sorts by channel and sequence number."""

    key: ChannelKey
    number: int
    sender: int = -1  # point-to-point only
    receiver: int = -1

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.key[2] if self.sender < 0 else (self.sender, self.receiver)


@dataclass
class Edge:
    """The reason why one node waits for another."""

    op: Collective  # the waiting rank's
    instance: Instance
    rank: int  # the waiting rank
    others: int = 0  # ranks that were not examined and wait like this one

    @property
    def is_from_any(self) -> bool:
        """Whether it is a receive from any source, which waits for each rank that may send."""
        return self.op.is_point_to_point and self.op.peer is None


@dataclass
class Graph:
    """The wait-for graph."""

    edges: dict[Node, dict[Node, Edge]] = field(default_factory=dict)
    # of "stuck" and "at" nodes, by their detail
    instances: list[Instance] = field(default_factory=list)
    blocks: dict[Node, Block] = field(default_factory=dict)
    waiters: dict[Node, set[Node]] = field(default_factory=dict)  # the edges reversed
    deadlocks: list[list[Node]] = field(default_factory=list)  # the cycles to report
    # groups whose ranks no file lists: those that use it are known
    unlisted: Collection[ChannelKey] = ()
    incomplete: bool = False  # threads were left out, since there would be too many edges

    def add(self, source: Node, target: Node, edge: Edge) -> None:
        """Add an edge, unless there is one between the two nodes."""
        self.edges.setdefault(source, {}).setdefault(target, edge)
        self.edges.setdefault(target, {})
        self.waiters.setdefault(target, set()).add(source)

    def drop(self, source: Node, target: Node) -> None:
        """Remove an edge, and its target if no other node waits for it."""
        del self.edges[source][target]
        self.waiters[target].discard(source)
        if not self.waiters[target] and not self.edges[target]:
            del self.edges[target]

    def sinks(self) -> list[Node]:
        """Return the nodes that wait for no other node."""
        return sorted(
            node
            for node, targets in self.edges.items()
            if not targets and node.kind not in ("wait", "at")
        )

    def is_alone(self, node: Node) -> bool:
        """Return whether a node is a collective of a group of which only one rank is known, as in
        the logs of torch's watchdog.
        """
        key = self.instances[node.detail].key
        return len(key[2]) == 1 and key in self.unlisted

    def edges_into(self, node: Node) -> list[Edge]:
        """Return the edges of the threads that wait for a node, directly or in a collective, by
        rank.
        """
        found = []
        for source in sorted(self.waiters.get(node, ())):
            if source.kind == "at":
                found += [
                    self.edges[waiting][source] for waiting in sorted(self.waiters.get(source, ()))
                ]
            elif source.kind == "wait":
                found.append(self.edges[source][node])
        return sorted(found, key=lambda edge: edge.rank)

    def reaching(self, targets: Iterable[Node]) -> set[Node]:
        """Return all nodes that wait for one of the targets, directly or through others."""
        seen: set[Node] = set()
        todo = list(targets)
        while todo:
            for source in self.waiters.get(todo.pop(), ()):
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        return seen

    def find_cycles(self) -> list[list[Node]]:
        """Return the strongly connected components of waiting threads that no edge leaves (Tarjan's
        algorithm, iteratively).
        """
        index: dict[Node, int] = {}
        low: dict[Node, int] = {}
        on_stack: set[Node] = set()
        stack: list[Node] = []
        found: list[list[Node]] = []
        # no sinks
        waiting = {
            node: sorted(end for end in ends if self.edges[end])
            for node, ends in self.edges.items()
            if ends
        }
        for root in sorted(waiting):
            if root in index:
                continue
            todo = [(root, iter(waiting[root]))]
            index[root] = low[root] = len(index)
            stack.append(root)
            on_stack.add(root)
            while todo:
                node, targets = todo[-1]
                for target in targets:
                    if target not in index:
                        index[target] = low[target] = len(index)
                        stack.append(target)
                        on_stack.add(target)
                        todo.append((target, iter(waiting[target])))
                        break
                    if target in on_stack:
                        low[node] = min(low[node], index[target])
                else:
                    todo.pop()
                    if todo:
                        low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
                    if low[node] == index[node]:
                        component = []
                        while True:
                            member = stack.pop()
                            on_stack.discard(member)
                            component.append(member)
                            if member == node:
                                break
                        members = set(component)
                        closed = all(
                            target in members
                            for member in component
                            for target in self.edges[member]
                        )
                        loop = (
                            sum(member.kind == "wait" for member in component) > 1
                            or node in self.edges[node]
                        )
                        if closed and loop:
                            found.append(sorted(component))
        return found


def shortest_cycle(graph: Graph, component: Iterable[Node]) -> list[tuple[Node, Node, Edge]]:
    """Return a shortest cycle in a component: for each of its waiting threads, the thread, the next
    one and the edge towards it.

    Empty if each cycle is one of threads of the same rank.
    """
    members = set(component)
    best: list[tuple[Node, Node, Edge]] = []
    for start in sorted(node for node in members if node.kind == "wait")[:_STARTS_MAX]:
        path = _shortest_cycle_from(graph, members, start)
        if path and (not best or len(path) < len(best)):
            best = path
    return best


def _shortest_cycle_from(
    graph: Graph, members: set[Node], start: Node
) -> list[tuple[Node, Node, Edge]]:
    """Search breadth first. A collective can have its waiting ranks among the ranks that it waits
    for: no rank waits for itself.
    """
    steps: dict[Node, tuple[Node, Node, Edge]] = {}
    first_at: dict[Node, Node] = {}  # the thread by which a collective was reached
    level = [start]
    while level:
        following: list[Node] = []
        for node in level:
            for target, edge in sorted(graph.edges[node].items(), key=lambda item: item[0]):
                ends = [target]
                if target.kind == "at":
                    # To the second thread, only the first one is new there.
                    ends = [first_at[target]] if target in first_at else sorted(graph.edges[target])
                    first_at.setdefault(target, node)
                for end in ends:
                    if end not in members or end.rank == node.rank or end in steps:
                        continue
                    steps[end] = (node, end, edge)
                    if end == start:
                        path = [steps[start]]
                        while path[0][0] != start:
                            path.insert(0, steps[path[0][0]])
                        return path
                    following.append(end)
        level = following
    return []
