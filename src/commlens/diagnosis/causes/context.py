"""The evidence that all causes are found in, what was found so far, and how records become data.

Each ``find_...`` function of this room gets the :class:`Context` and appends a :class:`Case` to it.
Of "rank 2 never reached all_reduce #7", the case has the cause ``Missing(culprits=[2], ...)``, the
others' all_reduce as its op, and ``train.py:57``, where rank 2 stands, as its frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from commlens.diagnosis.align.alignment import RecordMismatch
from commlens.diagnosis.graph.wait_graph import Edge, Graph, Instance, WaitNode
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.activity import Activity
from commlens.diagnosis.index.job_index import BlockedThread, JobIndex, RankView
from commlens.matching.error_texts import is_timeout
from commlens.model.cause import (
    Cause,
    CollectiveRef,
    Doing,
    ExitKind,
    GroupRef,
    Wait,
)
from commlens.model.collective import Collective, Frame
from commlens.model.grouping import grouped

C = TypeVar("C", bound=Cause)

TOO_LONG = 8  # stall timeouts that others wait, after which work is no excuse
MOTIONLESS = 3  # stall timeouts after which a job that waits for no rank counts as stuck


@dataclass
class Case(Generic[C]):
    """A cause, with the evidence that words are made of, and its weight among the others."""

    cause: C  # its culprits and victims may be changed by later decisions
    op: Collective | None = None  # that the finding names
    frame: Frame | None = None  # the culprit's line
    edges: Sequence[Edge] = ()  # the waits
    blocked: Sequence[int] = ()  # ranks that wait because of it, directly or behind others
    ops: Mapping[int, Collective] = field(default_factory=dict)  # by rank
    weight: int = 0  # number of ranks that wait because of it; 0 at first: as many as are blocked
    order: tuple[int, ...] = ()  # deterministic, earliest first
    mismatch: RecordMismatch | None = None  # on which ranks disagree or are out of step

    def __post_init__(self) -> None:
        """Sort the ranks of the cause, and give the case the weight of its blocked ranks, unless it
        has one.
        """
        self.weight = self.weight or len(self.blocked)
        self.cause.culprits.sort()
        self.cause.victims.sort()


class Context:
    """The indexed ranks, their disagreements and their wait-for graph, and what was found in
    them so far.
    """

    def __init__(self, job: JobIndex, mismatches: list[RecordMismatch], graph: Graph) -> None:
        self.job = job
        self.mismatches = mismatches
        self.graph = graph
        self.cases: list[Case[Any]] = []

    def blocked_by(self, nodes: Iterable[WaitNode]) -> list[int]:
        """Return the ranks whose wait ends at one of these nodes."""
        return sorted({node.rank for node in self.graph.reaching(nodes) if node.kind == "wait"})

    def doing(self, view: RankView) -> Activity:
        """Classify the activity of a rank that has not arrived. Without the dump's time, its quiet
        time is unknown.
        """
        # it is the only known rank of the group in whose collective it is
        if view.head is not None and self.graph.is_unknown(view.head.op.channel.key):
            return Activity("in-collective", False, "in-another-group", for_ns=view.head.age_ns)
        quiet = activity.quiet_ns(view.log) if view.log.captured_ns or not self.job.foreign else 0
        return activity.activity_of(
            view.log, view.exit, quiet_ns=quiet, stalled_after_ns=self.job.stalled_after_ns
        )

    def longest_wait(self, ranks: Iterable[int]) -> int:
        """Return the longest time that one of these ranks has been waiting, in ns; 0 if the records
        have no times.
        """
        if self.job.foreseen:
            return 0
        return max((block.age_ns for block in self._blocks(ranks)), default=0)

    def longest_of(self, edges: Iterable[Edge], ranks: Collection[int] = ()) -> int:
        """Return the longest of the waits that these edges show, or only those of these ranks, in
        ns; 0 if the records have no times.
        """
        if self.job.foreseen:
            return 0
        among = set(ranks)
        waits = (
            self._waits_of(edge) or self._blocks([edge.rank])
            for edge in edges
            if not among or edge.rank in among
        )
        return max((block.age_ns for blocks in waits for block in blocks), default=0)

    def held_up_ns(self, edges: Iterable[Edge]) -> int:
        """Return for how long the waits that these edges show have held up their ranks, in ns.

        A thread beside the main one may wait for a command for hours: while its rank's main thread
        issues collectives, it holds up nothing.
        """
        held_up = 0
        for edge in edges:
            for block in self._waits_of(edge):
                view = self.job.views[edge.rank]
                is_beside = block.thread != view.main_thread and not block.op.channel.runs_ahead
                quiet_ns = activity.quiet_ns(view.log) if is_beside else 0
                held_up = max(held_up, min(block.age_ns, quiet_ns or block.age_ns))
        return held_up

    def waits_too_long(self, ranks: Iterable[int], *, timeouts: int = TOO_LONG) -> bool:
        """Return whether one of these ranks has waited for so many stall timeouts that work is no
        excuse.
        """
        return self.longest_wait(ranks) >= timeouts * self.job.stall_timeout_ns

    def timed_out(self, edge: Edge) -> bool:
        """Return whether the wait ended at its timeout: by an error or, on a device, by torch's
        watchdog.
        """
        return is_timeout(edge.op.error) or self.job.views[edge.rank].exit.gave_up

    def assumed(self, ranks: Iterable[int]) -> bool:
        """Return whether the wait of these ranks is only inferred from an op in flight."""
        return {block.how for block in self._blocks(ranks)} <= {"assumed", "unknown"}

    def completion_unknown(self, ranks: Iterable[int]) -> bool:
        """Return whether it is unknown if the last ops of these ranks have completed on their
        devices.
        """
        hows = {block.how for block in self._blocks(ranks)}
        return not hows or hows == {"unknown"}  # without a block, as of a rank in a message

    def _waits_of(self, edge: Edge) -> list[BlockedThread]:
        """Return the threads of an edge's rank that wait on the channel of its op."""
        key = edge.op.channel.key
        return [block for block in self._blocks([edge.rank]) if block.op.channel.key == key]

    def _blocks(self, ranks: Iterable[int]) -> list[BlockedThread]:
        return [
            block
            for rank in ranks
            if rank in self.job.views
            for block in self.job.views[rank].blocks.values()
        ]


def waits_of(context: Context, edges: Iterable[Edge]) -> list[Wait]:
    """Return the waits of ranks as data: those in one collective at one line together, the most
    ranks first.
    """
    alike = grouped(
        (
            (collective_of(op), "" if op.is_store_wait else op.channel.group.name, source_of(op)),
            edge,
        )
        for edge in edges
        for op in [edge.op]
    )
    waits = []
    for (collective, _, source), same in alike.items():
        others = {edge.rank: edge.others for edge in same}  # not examined, and wait like the rank
        waited_s = context.longest_of(same) / 1e9
        wait = Wait(sorted(others), collective, group_of(same[0].op), source, waited_s)
        waits.append((len(others) + sum(others.values()), wait))
    return [wait for _, wait in sorted(waits, key=lambda one: (-one[0], one[1].ranks))]


def group_of(op: Collective) -> GroupRef | None:
    """Return the group of a collective; none of a wait for a key of the store."""
    group = op.channel.group
    return None if op.is_store_wait else GroupRef(group.name, group.label, list(group.all_ranks))


def collective_of(op: Collective) -> CollectiveRef:
    """Return a collective as verdicts name it."""
    return CollectiveRef(op.op, op.sequence_number, op.peer)


def source_of(op: Collective) -> str | None:
    """Return the file name and line number of the user's line that issued a collective."""
    return op.source.where if op.source is not None else None


def doing_of(activity: Activity) -> Doing:
    """Return an activity as data."""
    where = activity.frame.where if activity.frame is not None else None
    return Doing(activity.why, activity.works, activity.observed, activity.unclear, where)


def processes_of(context: Context, ranks: Iterable[int]) -> list[ExitKind]:
    """Return whether the processes of these ranks run, or how they ended."""
    views = context.job.views
    return [views[rank].exit.kind if rank in views else "unrecorded" for rank in ranks]


def most_waited(context: Context, edges: Sequence[Edge]) -> Edge:
    """Return the representative edge: of the instance in which most ranks wait, the one announced
    first. A wait counts only if the rank's main thread does not wait in a newer one.
    """
    ranks: Counter[Instance] = Counter()
    for edge in edges:
        ranks[edge.instance] += 1 + edge.others
    return min(
        [edge for edge in edges if not _main_went_on(context, edge)] or edges,
        key=lambda edge: (-ranks[edge.instance], edge.op.announced_ns, edge.instance, edge.rank),
    )


def _main_went_on(context: Context, edge: Edge) -> bool:
    """Return whether a thread beside the main one waits, and the main one went on to wait in a
    newer call.
    """
    view = context.job.views.get(edge.rank)
    block = view.blocks.get(view.main_thread) if view is not None else None
    return (
        block is not None
        and (edge.op.wait_thread or edge.op.issue_thread or block.thread) != block.thread
        and block.op.channel.key != edge.op.channel.key
        and block.op.announced_ns > edge.op.announced_ns
    )


def op_at(view: RankView, instance: Instance) -> Collective | None:
    """Return a rank's own record of an instance."""
    if instance.sender < 0:
        return view.op_at(instance.key, instance.number)
    peer, direction = (
        (instance.receiver, "send") if view.rank == instance.sender else (instance.sender, "recv")
    )
    ops = reversed(view.pairs.get((instance.key, peer, direction), []))
    return next((op for op in ops if op.sequence_number == instance.number), None)
