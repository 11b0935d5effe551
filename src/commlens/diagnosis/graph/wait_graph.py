"""The wait-for graph: each blocked thread points to the threads or ranks that it waits for. Its
sinks and cycles are root causes.

Say ranks 0 and 1 wait in ``all_reduce #7`` for rank 2, which loads data. Then ``edges`` leads from
``WaitNode("wait", 0, thread)`` and ``WaitNode("wait", 1, thread)`` to ``WaitNode("at", detail=0)``,
which stands for ``instances[0]``, the all_reduce on all its ranks, and from there to the sink
``WaitNode("absent", 2)``. Since a collective is a node of its own, the number of edges is linear in
the number of ranks, not quadratic.

The rank that should write a key of the job's store is inferred from the ranks that have written
keys of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commlens.diagnosis.index.job_index import BlockedThread, JobIndex
from commlens.model.collective import ChannelKey, Collective
from commlens.model.ops import STORE_SERVER, key_kind

_STARTS_MAX = 64  # threads from which a shortest cycle is searched


class WaitNode(NamedTuple):
    """A blocked thread, a collective that threads wait in, or a sink: the end of their waiting.

    Kinds: ``"wait"``, a blocked thread; ``"at"``, a collective that some of its ranks have not
    reached. Sinks: ``"absent"``, a rank that is not blocked; ``"dead"``; ``"no-record"``;
    ``"elsewhere"``, a rank that probably runs on another node; ``"mismatch"``; ``"stuck"``, a
    collective or message that all its ranks have reached; ``"key"``, a key of the store whose
    writer is unknown, or a store that is not made yet.
    """

    kind: str
    rank: int = -1
    detail: int = 0  # thread, or index of the mismatch or instance


class Instance(NamedTuple):
    """One collective on all of its ranks, or one message: ``all_reduce #7`` of a channel, of which
    each rank has a record of its own. Sorts by channel and sequence number.
    """

    key: ChannelKey
    number: int
    sender: int = -1  # point-to-point only
    receiver: int = -1

    @classmethod
    def of(cls, op: Collective) -> Instance:
        """Return the instance of a collective."""
        return cls(op.channel.key, op.sequence_number)

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

    edges: dict[WaitNode, dict[WaitNode, Edge]] = field(default_factory=dict)
    # of "stuck" and "at" nodes, by their detail
    instances: list[Instance] = field(default_factory=list)
    blocks: dict[WaitNode, BlockedThread] = field(default_factory=dict)
    waiters: dict[WaitNode, set[WaitNode]] = field(default_factory=dict)  # the edges reversed
    deadlocks: list[list[WaitNode]] = field(default_factory=list)  # the cycles to report
    # groups whose ranks no file lists: those that use it are known
    unlisted: Collection[ChannelKey] = ()
    incomplete: bool = False  # threads were left out, since there would be too many edges

    def add(self, source: WaitNode, target: WaitNode, edge: Edge) -> None:
        """Add an edge, unless there is one between the two nodes."""
        self.edges.setdefault(source, {}).setdefault(target, edge)
        self.edges.setdefault(target, {})
        self.waiters.setdefault(target, set()).add(source)

    def drop(self, source: WaitNode, target: WaitNode) -> None:
        """Remove an edge, and its target if no other node waits for it."""
        del self.edges[source][target]
        self.waiters[target].discard(source)
        if not self.waiters[target] and not self.edges[target]:
            del self.edges[target]

    def sinks(self) -> list[WaitNode]:
        """Return the nodes that wait for no other node."""
        return sorted(
            node
            for node, targets in self.edges.items()
            if not targets and node.kind not in ("wait", "at")
        )

    def is_alone(self, node: WaitNode) -> bool:
        """Return whether a node is a collective of a group with only one known rank."""
        return self.is_unknown(self.instances[node.detail].key)

    def is_unknown(self, key: ChannelKey) -> bool:
        """Return whether only one rank of a group is known, as in the logs of torch's watchdog."""
        return len(key[2]) == 1 and key in self.unlisted

    def edges_into(self, node: WaitNode) -> list[Edge]:
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

    def edges_into_all(self, nodes: Iterable[WaitNode]) -> list[Edge]:
        """Return the edges of the threads that wait for any of the nodes, node by node."""
        return [edge for node in nodes for edge in self.edges_into(node)]

    def reaching(self, targets: Iterable[WaitNode]) -> set[WaitNode]:
        """Return all nodes that wait for one of the targets, directly or through others."""
        seen: set[WaitNode] = set()
        todo = list(targets)
        while todo:
            for source in self.waiters.get(todo.pop(), ()):
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        return seen

    def find_cycles(self) -> list[list[WaitNode]]:
        """Return the strongly connected components of waiting threads that no edge leaves: these
        threads wait for each other alone, so they wait for ever.
        """
        waiting = {  # without the sinks
            node: [end for end in ends if self.edges[end]]
            for node, ends in self.edges.items()
            if ends
        }
        found = []
        for component in components(waiting):
            root, members = component[-1], {*component}
            closed = all(members.issuperset(self.edges[member]) for member in component)
            threads = sum(member.kind == "wait" for member in component)
            if closed and (threads > 1 or root in self.edges[root]):
                found.append(sorted(component))
        return found


def components(edges: Mapping[WaitNode, Sequence[WaitNode]]) -> Iterator[list[WaitNode]]:
    """Yield the strongly connected components of a graph, each with the node last that was reached
    first (Tarjan's algorithm, iteratively).
    """
    index: dict[WaitNode, int] = {}
    low: dict[WaitNode, int] = {}
    stack: dict[WaitNode, None] = {}  # in the order in which the nodes were reached
    todo: list[tuple[WaitNode, Iterator[WaitNode]]] = []

    def reach(node: WaitNode) -> None:
        index[node] = low[node] = len(index)
        stack[node] = None
        todo.append((node, iter(sorted(edges[node]))))

    for root in sorted(edges):
        if root not in index:
            reach(root)
        while todo:
            node, targets = todo[-1]
            target = next(targets, None)
            if target is None:
                todo.pop()
                for parent, _ in todo[-1:]:
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component = []
                    while node in stack:
                        component.append(stack.popitem()[0])
                    yield component
            elif target not in index:
                reach(target)
            elif target in stack:
                low[node] = min(low[node], index[target])


def shortest_cycle(
    graph: Graph, component: Iterable[WaitNode]
) -> list[tuple[WaitNode, WaitNode, Edge]]:
    """Return a shortest cycle in a component: for each of its waiting threads, the thread, the next
    one and the edge towards it.

    Empty if each cycle is one of threads of the same rank.
    """
    members = set(component)
    starts = sorted(node for node in members if node.kind == "wait")[:_STARTS_MAX]
    paths = (_shortest_cycle_from(graph, members, start) for start in starts)
    return min(filter(None, paths), key=len, default=[])


def _shortest_cycle_from(
    graph: Graph, members: set[WaitNode], start: WaitNode
) -> list[tuple[WaitNode, WaitNode, Edge]]:
    """Search breadth first. A collective can have its waiting ranks among the ranks that it waits
    for: no rank waits for itself.
    """
    # by thread: the step by which it was reached first
    steps: dict[WaitNode, tuple[WaitNode, WaitNode, Edge]] = {}
    first_at: dict[WaitNode, WaitNode] = {}  # the thread by which a collective was reached
    level = [start]
    while level:
        following: list[WaitNode] = []
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


# --- who should write the key, or make the store, that a rank waits for

_DIGITS = re.compile(r"\d+")


def writes_of_kind(job: JobIndex, op: Collective) -> dict[int, Collective]:
    """Return the first write of each rank to a key that is the same but for its numbers."""
    kind = key_kind(op.channel.group.name)
    return {
        rank: write
        for rank, view in job.views.items()
        for write in view.log.keys_written
        if key_kind(write.channel.group.name) == kind
    }


def expected_writer(job: JobIndex, op: Collective) -> int | None:
    """Return the rank that should write the key that ``op`` waits for; None if the records do not
    show it.

    It is the only rank that has written keys of this kind; or, if several ranks each write a key
    that holds their rank, the rank in this key; or the only rank of the job that does not wait for
    the key. For a store that is not made yet, it is the only one that is in no call.
    """
    if not op.is_for_key:
        return _expected_maker(job, op)
    waits = {rank for rank, view in job.views.items() if _waits_for(view.log.store_wait, op)}
    wrote = writes_of_kind(job, op)
    able = sorted(wrote.keys() - waits)
    if len(able) == 1:
        return able[0]
    found, writer = _writer_in_key(op, wrote, job.size)
    if found:
        return writer if writer not in waits else None
    others = set(range(job.size)) - waits
    return others.pop() if not wrote and len(others) == 1 else None


def _writer_in_key(
    op: Collective, wrote: Mapping[int, Collective], size: int
) -> tuple[bool, int | None]:
    """Return whether keys of this kind hold the rank of their writer, in its own world, and the
    writer that this key names; None if there is no such rank.
    """
    ranks = op.channel.group.ranks or range(size)
    own = {ranks.index(rank): write for rank, write in wrote.items() if rank in ranks}
    for at, number in enumerate(_DIGITS.findall(op.channel.group.name)):
        if own and all(
            _DIGITS.findall(write.channel.group.name)[at] == str(rank)
            for rank, write in own.items()
        ):
            return True, ranks[int(number)] if int(number) < len(ranks) else None
    return False, None


def _waits_for(wait: Collective | None, op: Collective) -> bool:
    return (
        wait is not None
        and wait.channel.group.name == op.channel.group.name
        and (wait.op == op.op or op.is_for_key)
    )


def _expected_maker(job: JobIndex, op: Collective) -> int | None:
    """Return the only rank of the job that is in no call: a server waits for it, and a client if
    nobody listens at its address. None if there is no such rank.
    """
    idle = [rank for rank, view in job.views.items() if not view.blocks]
    unmade = op.op == STORE_SERVER or listens_at(job, op) is False
    return idle[0] if unmade and len(idle) == 1 and len(job.views) == job.size else None


def listens_at(job: JobIndex, op: Collective) -> bool | None:
    """Return whether a process listens where ranks wait for a store like ``op``; None if its host
    does not show it. The hosts of other ranks do not know.
    """
    seen = [
        view.log.observation.store
        for view in job.views.values()
        if _waits_for(view.log.store_wait, op)
    ]
    return max((each.listens for each in seen if each is not None), default=None)
