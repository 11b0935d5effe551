"""The wait-for graph of classes of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from commlens.diagnosis.graph.wait_graph import Edge, Node
from commlens.reports.verdict_page.data import GraphEdge, GraphNode, WaitGraph
from commlens.reports.verdict_page.job import Job, phrase
from commlens.text import capital, count, format_ranks, key_phrase, op_phrase, ranks_phrase


def wait_graph(job: Job) -> WaitGraph:
    """Fold the graph of threads: one node for each class that waits or is waited for, one edge for
    each pair of classes.
    """
    return _Fold(job).graph()


class _Fold:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.nodes: list[GraphNode] = []
        self._known: dict[tuple[str, int], int] = {}
        self._edges: dict[tuple[int, int], dict[str, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )

    def graph(self) -> WaitGraph:
        graph = self.job.graph
        through: dict[Node, list[Node]] = defaultdict(list)
        for source in sorted(graph.edges):
            for target, edge in graph.edges[source].items() if source.kind == "wait" else ():
                if target.kind == "at":
                    through[target].append(source)
                else:
                    self._join([source.rank], edge, self._ends(target, edge))
        # Join the ranks that wait in a collective and those that it waits for by class: there may
        # be thousands of both.
        for meeting, sources in through.items():
            edge = graph.edges[sources[0]][meeting]
            ends = {
                end
                for target, behind in graph.edges[meeting].items()
                for end in self._ends(target, behind)
            }
            self._join([source.rank for source in sources], edge, ends)
        edges = []
        waiting = {pair: set().union(*by_label.values()) for pair, by_label in self._edges.items()}
        shown = _transitive_reduction(waiting)
        parted = {
            start
            for start, end in shown
            if any(
                waiting[start, other] != waiting[start, end]
                for first, other in shown
                if first == start
            )
        }
        for (start, end), by_label in sorted(self._edges.items()):
            if (start, end) not in shown:
                continue
            first = max(by_label, key=lambda text: (len(by_label[text]), text))
            more = f" and {len(by_label) - 1} more" if len(by_label) > 1 else ""
            ranks = waiting[start, end]
            some = f"{capital(ranks_phrase(sorted(ranks)))}: " if start in parted else ""
            edges.append(
                GraphEdge(
                    source=start, target=end, label=some + first + more, waiting=format_ranks(ranks)
                )
            )
        return WaitGraph(self.nodes, edges)

    def _join(self, ranks: Iterable[int], edge: Edge, ends: Iterable[int]) -> None:
        label = phrase(edge.op)
        ends = list(ends)
        for rank in ranks:
            start = self._of_rank(rank)
            for end in ends:
                self._edges[start, end][label].add(rank)

    def _put(self, kind: str, number: int, node: GraphNode) -> int:
        at = self._known.setdefault((kind, number), len(self.nodes))
        if at == len(self.nodes):
            self.nodes.append(node)
        return at

    def _of_rank(self, rank: int) -> int:
        number = self.job.class_of[rank]
        return self._put(
            "class",
            number,
            GraphNode(cls=number, root=self.job.classes[number].role in ("culprit", "awaited")),
        )

    def _ends(self, target: Node, edge: Edge) -> list[int]:
        """Return the nodes at the end of a wait."""
        job = self.job
        if target.kind == "mismatch":
            mismatch = job.mismatches[target.detail]
            culprits = [
                rank for rank in mismatch.culprits if rank != edge.rank and rank in job.class_of
            ]
            if edge.rank not in mismatch.culprits and not mismatch.tie and culprits:
                return sorted({self._of_rank(rank) for rank in culprits})
            title = (
                "These ranks disagree"
                if mismatch.answer is not None
                else "These ranks are out of step"
            )
            text = mismatch.answer.detail if mismatch.answer is not None else ""
            lines = [line for line in (phrase(next(iter(mismatch.ops.values()))), text) if line]
            return [
                self._put("mismatch", target.detail, GraphNode(title=title, lines=lines, root=True))
            ]
        if target.kind == "key":
            return [
                self._put(
                    "key",
                    target.detail,
                    GraphNode(title=capital(key_phrase(edge.op)), lines=["not written"], root=True),
                )
            ]
        if target.kind == "stuck":
            members = edge.instance.members
            done = job.examined.completed_on(edge.instance)
            title = f"{capital(count(len(members), 'rank'))} arrived, none has completed it"
            if done:
                title = (
                    f"Completed on {ranks_phrase(done)}, but not on"
                    f" {ranks_phrase(sorted({*members} - {*done}))}"
                )
            return [
                self._put(
                    "stuck",
                    target.detail,
                    GraphNode(title=title, lines=[op_phrase(edge.op)], root=True),
                )
            ]
        return [self._of_rank(target.rank)] if target.rank in job.class_of else []


def _transitive_reduction(edges: Mapping[tuple[int, int], set[int]]) -> set[tuple[int, int]]:
    """Drop an edge if a longer path joins its nodes for all its ranks; among nodes that wait for
    each other, keep all edges.

    Args:
        edges: by pair of classes, the ranks of the first class that wait for the second.
    """
    after: dict[int, set[int]] = defaultdict(set)
    for start, end in edges:
        # ranks may wait within their class; the graph shows which classes hold it up
        if start != end:
            after[start].add(end)

    def reached(starts: Iterable[int]) -> set[int]:
        seen: set[int] = set()
        todo = list(starts)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += after.get(node, ())
        return seen

    reach = {node: reached(after[node]) for node in list(after)}
    kept: set[tuple[int, int]] = set()
    for start, ends in after.items():
        for end in ends:
            between = (
                other
                for other in ends
                if other != end
                and start not in reach.get(other, ())
                and other not in reach.get(end, ())
            )
            if not any(
                end in reach.get(other, ()) and edges[start, end] <= edges[start, other]
                for other in between
            ):
                kept.add((start, end))
    return kept
