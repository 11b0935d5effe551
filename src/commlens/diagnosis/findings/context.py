"""What the findings share: the world, the graph, and how ranks and waits are put in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commlens.diagnosis import activity
from commlens.diagnosis.activity import Doing
from commlens.diagnosis.alignment import Trouble
from commlens.diagnosis.index import View, World
from commlens.diagnosis.wait_graph import Edge, Graph, Instance, Node
from commlens.model.collective import Collective, Frame, State
from commlens.model.verdict import CollectiveRef, Confidence, Finding, GroupRef, Kind, Why
from commlens.text import args_phrase, capital, duration, frame_phrase, group_phrase, op_phrase, ranks_phrase, verb


@dataclass
class Case:
    """A finding, with what decides its place among the others."""

    finding: Finding
    blocked: int = 0  # ranks that wait because of it
    order: tuple[int, ...] = ()  # deterministic, earliest first


class Context:
    """What all findings are made from, and the phrases that they share."""

    def __init__(self, world: World, troubles: list[Trouble], graph: Graph) -> None:
        self.world = world
        self.troubles = troubles
        self.graph = graph
        self.cases: list[Case] = []

    def add(self, finding: Finding, node: Node | None = None, order: tuple[int, ...] = ()) -> None:
        """Note a finding; it blocks what waits for ``node``."""
        blocked = len(self.blocked_by([node])) if node is not None else 0
        self.cases.append(Case(finding, blocked, order))

    def blocked_by(self, nodes: Iterable[Node]) -> list[int]:
        """Ranks whose waiting ends in these."""
        return sorted({node.rank for node in self.graph.reaching(nodes) if node.kind == "wait"})

    def name(self, rank: int) -> str:
        """``"rank 2 (host n03, pid 4121)"``."""
        log = self.world.views[rank].log
        about = [f"host {log.host}"] if log.host else []
        about += [f"pid {log.pid}"] if log.pid else []
        return f"rank {rank}" + (f" ({', '.join(about)})" if about else "")

    def doing(self, view: View) -> Doing:
        """What a rank does that is not where others wait for it. How long it has been quiet is not known without the dump's time."""
        quiet = activity.quiet_ns(view.log) if view.log.captured_ns or not self.world.foreign else 0
        return activity.doing(view.log, view.fate, quiet_ns=quiet, stalled_after_ns=self.world.stalled_after_ns)

    def last(self, rank: int) -> str:
        """``"its last collective, all_reduce #40 of group dp [0-3], completed"``."""
        view = self.world.views[rank]
        op = view.last_op
        if op is None:
            return "nothing of it is in flight" if self.world.foreign else "it never issued a collective"
        state = {
            State.COMPLETED: "completed",
            State.FAILED: "failed",
            State.UNKNOWN: "was issued",
        }.get(op.state, "is in flight")
        return f"its last collective, {op_phrase(op)}, {state}"

    def edges_into(self, node: Node) -> list[Edge]:
        """Who waits for it directly."""
        return self.graph.edges_into(node)

    def waiting_at(self, edges: Sequence[Edge]) -> str:
        """``"Ranks 0-1,3 have been waiting for 31 s at train.py:81 step, float32[1048576] SUM"``; by line where lines differ."""
        places: dict[str, list[int]] = defaultdict(list)
        for edge in edges:
            text = frame_phrase(edge.op.source)
            places[text].append(edge.rank)
        parts = []
        for text, ranks in sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))[:3]:
            where = f" at {text}" if text else ""
            waited = self.longest(ranks)
            length = f" for {duration(waited)}" if waited >= self.world.stalled_after_ns else ""
            has = verb(ranks, "has", "have")
            parts.append(f"{ranks_phrase(ranks)} {has} been waiting{length}{where}")
        what = args_phrase(edges[0].op) if edges else ""
        return "; ".join(parts) + (f", {what}" if what else "")

    def longest(self, ranks: Iterable[int]) -> int:
        """For how long one of these has waited, in ns."""
        ages = [block.age_ns for rank in ranks if rank in self.world.views for block in self.world.views[rank].blocks.values()]
        return max(ages, default=0)

    def behind(self, direct: Sequence[int], everybody: Sequence[int]) -> str:
        """``"Ranks 4-7 wait behind them. "``; empty where nobody does."""
        more = sorted(set(everybody) - set(direct))
        return f"{capital(ranks_phrase(more))} {verb(more, 'waits', 'wait')} behind {verb(direct, 'it', 'them')}. " if more else ""

    def assumed(self, ranks: Iterable[int]) -> bool:
        """Whether that these ranks wait is only concluded from an op in flight."""
        blocks = [block for rank in ranks if rank in self.world.views for block in self.world.views[rank].blocks.values()]
        return bool(blocks) and all(block.how == "assumed" for block in blocks)


def make_finding(
    kind: Kind, reason: Why, culprits: Sequence[int], victims: Sequence[int], confidence: Confidence, summary: str, explanation: str,
    next_step: str, op: Collective | None, frame: Frame | None, evidence: list[str], more: str | None, *, root: bool = True,
) -> Finding:  # fmt: skip
    """A finding on what ``op`` and ``frame`` name."""
    group = reference = None
    if op is not None:
        known = op.channel.group
        group = GroupRef(known.name, known.label, list(known.ranks))
        reference = CollectiveRef(op.op, op.sequence_number, op.peer)
    return Finding(
        kind=kind, why=reason, root_cause=root, culprits=sorted(culprits), victims=sorted(victims), confidence=confidence, summary=summary,
        explanation=explanation.strip(), next_step=next_step, group=group, collective=reference,
        source=frame.where if frame is not None else None, source_file=f"{frame.file}:{frame.line}" if frame is not None else None,
        function=frame.function if frame is not None else None, evidence=evidence, would_raise_confidence=more,
    )  # fmt: skip


def at_line(op: Collective) -> str:
    """``" (train.py:81)"``."""
    return f" ({op.source.where})" if op.source is not None else ""


def of_group(op: Collective) -> str:
    """``" of group dp [0-3]"``."""
    return f" of {group_phrase(op.channel.group)}"


def most_waited(edges: Sequence[Edge]) -> Edge:
    """The edge that stands for all: of the instance in which most ranks wait, the one that was waited for first."""
    ranks: Counter[Instance] = Counter(edge.instance for edge in edges)
    return min(edges, key=lambda edge: (-ranks[edge.instance], edge.op.announced_ns, edge.instance, edge.rank))


def op_at(view: View, which: Instance) -> Collective | None:
    """A rank's own record of an instance."""
    if which.sender < 0:
        track = view.tracks.get(which.key)
        return track.ops.get(which.number) if track is not None else None
    peer, direction = (which.receiver, "send") if view.rank == which.sender else (which.sender, "recv")
    return next((op for op in reversed(view.pairs.get((which.key, peer, direction), [])) if op.sequence_number == which.number), None)
