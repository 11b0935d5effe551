"""The wait-for graph of classes of ranks, which the page of a verdict draws.

A class is the ranks that do the same (:mod:`commlens.reports.verdict_page.job`). For example, rank
3 of 8 has skipped the broadcast #4 and waits in the all_reduce #5, and the others wait for it in
the broadcast. The graph of threads has an edge from each of seven ranks to rank 3, and from rank 3
to each of them. Here these become two nodes, "ranks 0-2, 4-7" and "rank 3", and one edge each way:
"broadcast #4" and "all_reduce #5".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from commlens.diagnosis.align.alignment import RecordMismatch
from commlens.diagnosis.graph.wait_graph import Edge, WaitNode
from commlens.model.collective import Collective
from commlens.model.grouping import grouped
from commlens.reports.verdict_page.data import GraphEdge, GraphNode, WaitGraph
from commlens.reports.verdict_page.job import PageJob, label, phrase
from commlens.text import capital, count, format_ranks, key_phrase, op_phrase, ranks_phrase

NamedOp = tuple[int, str, str]
"""An op's number, its name with the number, and its group's label; the label of a message or of a
wait for a key is empty, and its name is a phrase.
"""


def wait_graph(job: PageJob) -> WaitGraph:
    """Fold the graph of threads: one node for each class that waits or is waited for, one edge for
    each pair of classes.
    """
    fold = _Fold(job)
    fold.add_waits()
    return WaitGraph(fold.nodes, fold.edges())


class _Fold:
    """The graph while it is made. Nodes are known by their index in ``nodes``."""

    def __init__(self, job: PageJob) -> None:
        self.job = job
        self.nodes: list[GraphNode] = []
        self._known: dict[tuple[str, int], int] = {}  # by kind and number: the node
        # by pair of nodes: the ops, and the ranks that wait in each
        self._edges: dict[tuple[int, int], dict[NamedOp, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )

    def add_waits(self) -> None:
        """Add the edges of all threads that wait."""
        graph = self.job.graph
        waiting_in: dict[WaitNode, list[WaitNode]] = defaultdict(list)  # by collective
        for thread in sorted(node for node in graph.edges if node.kind == "wait"):
            for target, edge in graph.edges[thread].items():
                if target.kind == "at":
                    waiting_in[target].append(thread)
                else:
                    self._add_edges([thread.rank], edge, self._end_nodes(target, edge))
        # Of a collective, find the end nodes once: thousands of ranks may wait in it, for thousands
        # of others.
        for collective, threads in waiting_in.items():
            ends = {
                end
                for target, edge in graph.edges[collective].items()
                for end in self._end_nodes(target, edge)
            }
            edge_into = graph.edges[threads[0]][collective]
            self._add_edges([thread.rank for thread in threads], edge_into, ends)

    def edges(self) -> list[GraphEdge]:
        """Return the edges that are shown, in the order of the nodes."""
        waiting = {pair: set().union(*by_op.values()) for pair, by_op in self._edges.items()}
        shown = _transitive_reduction(waiting)
        by_start = grouped((start, frozenset(waiting[start, end])) for start, end in shown)
        # nodes of which some ranks wait for one node, and some for another
        parted = {start for start, sets in by_start.items() if len({*sets}) > 1}
        return [
            GraphEdge(
                source=start,
                target=end,
                label=_edge_label(self._edges[start, end]),
                waiting=format_ranks(waiting[start, end]),
                parted=start in parted,
            )
            for start, end in sorted(shown)
        ]

    def _add_edges(self, ranks: Iterable[int], edge: Edge, ends: Collection[int]) -> None:
        """Add an edge from the class of each rank to each end. If the rank's box on the page names
        a later op of the same channel, the edge names both ops.
        """
        name = _named_op(edge.op)
        for rank in ranks:
            start, names = self._class_node(self.job.class_of[rank]), [name]
            in_box = self.job.block_of(rank)
            if (
                in_box is not None
                and in_box.op.channel == edge.op.channel
                and in_box.op.sequence_number > edge.op.sequence_number
            ):
                names.append(_named_op(in_box.op))
            for end in ends:
                for each in names:
                    self._edges[start, end][each].add(rank)

    def _add_node(self, kind: str, number: int, node: GraphNode) -> int:
        """Return the index of the node of this kind and number, which is added if it is new."""
        at = self._known.setdefault((kind, number), len(self.nodes))
        if at == len(self.nodes):
            self.nodes.append(node)
        return at

    def _class_node(self, number: int) -> int:
        return self._add_node(
            "class",
            number,
            GraphNode(cls=number, root=self.job.classes[number].role in ("culprit", "awaited")),
        )

    def _end_nodes(self, target: WaitNode, edge: Edge) -> list[int]:
        """Return the nodes at the end of a wait: the class of the rank that is waited for, or a
        node of its own for what no rank alone holds up: a mismatch, a key that no rank writes, or a
        collective that all have entered and not all completed.
        """
        job = self.job
        if target.kind == "mismatch":
            mismatch = job.mismatches[target.detail]
            ends = {
                job.class_of[rank]
                for rank in _awaited_in(mismatch, edge.rank)
                if rank in job.class_of
            }
            if ends - {job.class_of[edge.rank]}:
                return [self._class_node(number) for number in sorted(ends)]
            answer = mismatch.answer
            title = "These ranks are out of step" if answer is None else "These ranks disagree"
            details = [answer.detail] if answer is not None and answer.detail else []
            lines = [phrase(next(iter(mismatch.ops.values()))), *details]
        elif target.kind == "key":
            title, lines = capital(key_phrase(edge.op)), ["not written"]
        elif target.kind == "stuck":
            members = edge.instance.members
            done = job.examined.completed_on(edge.instance)
            rest = sorted({*members} - {*done})
            title = (
                f"Completed on {ranks_phrase(done)}, but not on {ranks_phrase(rest)}"
                if done
                else f"{capital(count(len(members), 'rank'))} arrived, none has completed it"
            )
            lines = [op_phrase(edge.op)]
        else:
            number = job.class_of.get(target.rank)
            return [] if number is None else [self._class_node(number)]
        node = GraphNode(title=title, lines=lines, root=True)
        return [self._add_node(target.kind, target.detail, node)]


def _awaited_in(mismatch: RecordMismatch, rank: int) -> Iterable[int]:
    """Return the ranks that a rank waits for in a mismatch: the culprits; for a culprit, the ranks
    that it met.
    """
    if mismatch.tie:
        parties = mismatch.answer.parties if mismatch.answer is not None else ()
        return {*mismatch.ops}.difference(*(p.ranks for p in parties if rank in p.ranks), {rank})
    return mismatch.others if rank in mismatch.culprits else mismatch.culprits


def _named_op(op: Collective) -> NamedOp:
    """Return an op with its name for an edge."""
    if op.is_point_to_point or op.is_store_wait:
        return op.sequence_number, phrase(op), ""
    return op.sequence_number, f"{op.op} #{op.sequence_number}", label(op)


def _edge_label(by_op: Mapping[NamedOp, set[int]]) -> str:
    """Return the collectives of an edge in the order of their numbers: ``"broadcast #4 and
    all_reduce #6 of dp"``. Of several groups or messages, return the op of the most ranks and count
    the others.
    """
    ops = sorted(by_op)
    (_, first, group), (_, last, _) = ops[0], ops[-1]
    if len(ops) > 1 and group and all(op[2] == group for op in ops):
        return f"{first} {'and' if len(ops) == 2 else 'to'} {last} of {group}"
    _, name, group = max(ops, key=lambda op: (len(by_op[op]), op))
    more = f" and {len(ops) - 1} more" if len(ops) > 1 else ""
    return f"{name} of {group}{more}" if group else f"{name}{more}"


def _transitive_reduction(edges: Mapping[tuple[int, int], set[int]]) -> set[tuple[int, int]]:
    """Drop an edge if a longer path joins its nodes for all its ranks; among nodes that wait for
    each other, keep all edges. If A waits for B and for C, and B for C, the edge from A to C goes,
    unless a rank of A waits for C alone.

    Args:
        edges: by pair of classes, the ranks of the first class that wait for the second.
    """
    # ranks may wait within their class; the graph shows which classes hold it up
    after = {
        start: {*ends}
        for start, ends in grouped(pair for pair in edges if pair[0] != pair[1]).items()
    }

    @cache
    def reached(start: int) -> set[int]:
        seen: set[int] = set()
        todo = list(after.get(start, ()))
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += after.get(node, ())
        return seen

    kept: set[tuple[int, int]] = set()
    for start, ends in after.items():
        for end in ends:
            on_the_way = (
                other
                for other in ends - {end}
                if end in reached(other)
                # else two of them wait for each other
                and start not in reached(other)
                and other not in reached(end)
            )
            if not any(edges[start, end] <= edges[start, other] for other in on_the_way):
                kept.add((start, end))
    return kept
