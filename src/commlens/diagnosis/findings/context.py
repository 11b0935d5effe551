"""The evidence that all findings are made from, the list of findings, and the phrases that several
of them share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commlens.diagnosis.align.alignment import Mismatch
from commlens.diagnosis.graph.wait_graph import Edge, Graph, Instance, Node
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.activity import Activity
from commlens.diagnosis.index.job_index import Block, JobIndex, RankView
from commlens.matching.error_texts import is_timeout
from commlens.model.collective import Collective, Frame, State
from commlens.model.verdict import CollectiveRef, Finding, GroupRef
from commlens.text import (
    args_phrase,
    capital,
    count,
    duration,
    frame_phrase,
    message_phrase,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_WAITS_MAX = 3  # collectives in which ranks wait
TOO_LONG = 8  # stall timeouts


@dataclass
class Case:
    """A finding and its weight among the others."""

    finding: Finding
    blocked: int = 0  # number of ranks that wait because of it
    order: tuple[int, ...] = ()  # deterministic, earliest first
    mismatch: Mismatch | None = None  # on which ranks disagree or are out of step


class Context:
    """The indexed ranks, their disagreements and their wait-for graph, and the findings made from
    them so far.
    """

    def __init__(self, job: JobIndex, mismatches: list[Mismatch], graph: Graph) -> None:
        self.job = job
        self.mismatches = mismatches
        self.graph = graph
        self.cases: list[Case] = []

    def add(
        self,
        finding: Finding,
        op: Collective | None,
        frame: Frame | None,
        *,
        blocked: int = 0,
        order: tuple[int, ...] = (),
        mismatch: Mismatch | None = None,
    ) -> None:
        """Add a finding on a collective and a source line.

        Args:
            finding: without its group, collective and source, which are filled in here.
            op: the collective.
            frame: the culprit's line.
            blocked: number of ranks that wait because of it.
            order: sorts findings that block equally many ranks.
            mismatch: on which ranks disagree or are out of step.
        """
        self.cases.append(Case(locate(finding, op, frame), blocked, order, mismatch))

    def blocked_by(self, nodes: Iterable[Node]) -> list[int]:
        """Return the ranks whose wait ends at one of these nodes."""
        return sorted({node.rank for node in self.graph.reaching(nodes) if node.kind == "wait"})

    def name(self, rank: int) -> str:
        """``"rank 2 (host n03, pid 4121)"``."""
        log = self.job.views[rank].log
        about = [f"host {log.host}"] if log.host else []
        about += [f"pid {log.pid}"] if log.pid else []
        return f"rank {rank}" + (f" ({', '.join(about)})" if about else "")

    def doing(self, view: RankView) -> Activity:
        """Classify the activity of a rank that has not arrived. Without the dump's time, its quiet
        time is unknown.
        """
        quiet = (
            activity.quiet_ns(view.log)
            if view.log.captured_ns or self.job.knows.capture_time
            else 0
        )
        return activity.activity_of(
            view.log, view.exit, quiet_ns=quiet, stalled_after_ns=self.job.stalled_after_ns
        )

    def last(self, rank: int) -> str:
        """``"its last collective, all_reduce #40 of group dp [0-3], completed"``."""
        op = self.job.views[rank].last_op
        if op is None:
            return (
                "it never issued a collective"
                if self.job.knows.completed_ops
                else "it has nothing in flight"
            )
        completed = "completed" if not self.job.views[rank].is_log else "was issued"
        states = {State.COMPLETED: completed, State.FAILED: "failed", State.UNKNOWN: "was issued"}
        return f"its last collective, {op_phrase(op)}, {states.get(op.state, 'is in flight')}"

    def waiting(self, edges: Sequence[Edge]) -> str:
        """``"Ranks 0-1,3 have been waiting for 31 s at train.py:81 step, float32[1048576] SUM."``;
        lines that differ are listed.
        """
        by_line: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
        reduce_ops = {
            (edge.op.op, edge.op.args.reduce_op) for edge in edges if edge.op.args.reduce_op
        }
        # a rank decodes its reduce ops some time after it issues them
        known = dict(reduce_ops) if len(reduce_ops) == 1 else {}
        for edge in edges:
            args = args_phrase(edge.op, known.get(edge.op.op))
            by_line[frame_phrase(edge.op.source), args, edge.op.state is State.FAILED].append(
                edge.rank
            )
        same_args = len({args for _, args, _ in by_line}) == 1
        parts = []
        for (line, args, failed), ranks in sorted(
            by_line.items(), key=lambda item: (-len(item[1]), item[1])
        )[:3]:
            waited = self.longest_wait(ranks)
            length = f" for {duration(waited)}" if waited >= self.job.stalled_after_ns else ""
            about = (f" at {line}" if line else "") + (
                f", {args}" if args and not same_args else ""
            )
            did = "waited" if failed else f"{verb(ranks, 'has', 'have')} been waiting"
            parts.append(
                f"{ranks_phrase(ranks)} {did}{length}{about}{', until it failed' * failed}"
            )
        args = next(args for _, args, _ in by_line)
        return prose(
            capital("; ".join(parts)) + (f", {args}." if args and same_args else "."),
            self._hosts(edges),
        )

    def _hosts(self, edges: Sequence[Edge]) -> str:
        """``"Their hosts ran ahead: rank 0 stands at train.py:90 log, rank 2 at train.py:57
        load_batch."``; empty if none did.
        """
        by_line: dict[str, list[int]] = defaultdict(list)
        for rank, op in {
            edge.rank: edge.op for edge in edges if edge.op.channel.runs_ahead
        }.items():
            stack = self.job.views[rank].log.main_stack
            frame = stack.source if stack is not None else None
            if (
                frame is not None
                and frame != op.source
                and not (stack is not None and stack.taken_ns and stack.taken_ns < op.announced_ns)
            ):
                by_line[frame_phrase(frame)].append(rank)
        if not by_line:
            return ""
        lines = sorted(by_line.items(), key=lambda item: (-len(item[1]), item[1]))[:3]
        if len(lines) == 1:
            line, ranks = lines[0]
            return (
                f"The {verb(ranks, 'host', 'hosts')} of {ranks_phrase(ranks)} ran ahead and"
                f" {verb(ranks, 'stands', 'stand')} at {line}."
            )
        (line, ranks), *others = lines
        said = [
            f"{ranks_and_verb(ranks, 'stands', 'stand')} at {line}",
            *(f"{ranks_phrase(ranks)} at {line}" for line, ranks in others),
        ]
        return f"The hosts ran ahead: {', '.join(said)}."

    def aborted(self, ranks: Iterable[int]) -> list[str]:
        """Return a sentence about those of some ranks that NCCL's watchdog aborted; none if there
        are none.
        """
        views = self.job.views
        gone = [rank for rank in sorted(ranks) if rank in views and views[rank].exit.gave_up]
        if not gone:
            return []
        text = views[gone[0]].exit.text
        return [
            f"{capital(ranks_phrase(gone))}"
            f" {text if len(gone) == 1 else text.replace('was ', 'were ', 1)}."
        ]

    def waiting_behind(self, ranks: Sequence[int], blocked: Iterable[int]) -> str:
        """``"Ranks 4-7 wait behind them."``, for the blocked ranks that are not among ``ranks``;
        empty if there are none.
        """
        more = sorted(set(blocked) - set(ranks))
        return (
            f"{capital(ranks_and_verb(more, 'waits', 'wait'))} behind {verb(ranks, 'it', 'them')}."
            if more
            else ""
        )

    def waits(self, edges: Sequence[Edge], singular: str, plural: str) -> str:
        """``"ranks 0,3 wait for it in all_reduce #7 of group tp [0-3], rank 5 in recv #1 from rank
        2"``: each rank in its own collective.

        Args:
            edges: the waits. Groups of one name share a phrase, and so do messages of one number to
                several peers.
            singular: the verb for one rank: "waits for it".
            plural: the verb for several.
        """
        by_name: dict[tuple[str, int, str, bool], list[Edge]] = defaultdict(list)
        for edge in edges:
            from_any = edge.op.is_point_to_point and edge.op.peer is None
            by_name[
                edge.op.op, edge.op.sequence_number, edge.op.channel.group.label, from_any
            ].append(edge)
        parts: list[str] = []
        for of_name in sorted(
            by_name.values(), key=lambda some: (-len({edge.rank for edge in some}), some[0].rank)
        ):
            ranks = sorted({edge.rank for edge in of_name})
            said = (
                f"{ranks_and_verb(ranks, singular, plural)}" if not parts else ranks_phrase(ranks)
            )
            parts.append(f"{said} in {collective_phrase([edge.op for edge in of_name])}")
        more = (
            [f"others in {count(len(parts) - _WAITS_MAX, 'more collective')}"]
            if len(parts) > _WAITS_MAX
            else []
        )
        return ", ".join([*parts[:_WAITS_MAX], *more])

    def longest_wait(self, ranks: Iterable[int]) -> int:
        """Return the longest time that one of these ranks has been waiting, in ns."""
        return max((block.age_ns for block in self._blocks(ranks)), default=0)

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
        """Return whether nothing tells that the last op of these ranks has not completed on their
        devices.
        """
        return {block.how for block in self._blocks(ranks)} == {"unknown"}

    def _blocks(self, ranks: Iterable[int]) -> list[Block]:
        return [
            block
            for rank in ranks
            if rank in self.job.views
            for block in self.job.views[rank].blocks.values()
        ]


def locate(finding: Finding, op: Collective | None, frame: Frame | None) -> Finding:
    """Fill in a finding's group and collective from ``op`` and its source from ``frame``, and sort
    its ranks.
    """
    finding.culprits, finding.victims = sorted(finding.culprits), sorted(finding.victims)
    if op is not None:
        group = op.channel.group
        finding.group = (
            GroupRef(group.name, group.label, list(group.ranks)) if not op.is_store_wait else None
        )
        finding.collective = CollectiveRef(op.op, op.sequence_number, op.peer)
    if frame is not None:
        finding.source, finding.source_file, finding.function = (
            frame.where,
            f"{frame.file}:{frame.line}",
            frame.function,
        )
    return finding


def collective_phrase(ops: Sequence[Collective]) -> str:
    """``"all_reduce #7 of group tp [0-3]"``, for groups of one name ``"... of 4 groups named tp"``;
    ``"send #3 to ranks 4-5"``.
    """
    op, groups = ops[0], {op.channel.key for op in ops}
    if op.is_point_to_point:
        return message_phrase(op, {op.peer for op in ops if op.peer is not None})
    return (
        op_phrase(op)
        if len(groups) == 1
        else f"{op_phrase(op, group=False)} of {len(groups)} groups named {op.channel.group.label}"
    )


def prose(*sentences: str) -> str:
    """Join the sentences that are not empty."""
    return " ".join(filter(None, sentences))


def first_line(error: str) -> str:
    """Return the first line of an error, short and without its full stop."""
    return error.strip().partition("\n")[0][:160].rstrip(". ") or "an error without a message"


def most_waited(edges: Sequence[Edge]) -> Edge:
    """Return the representative edge: of the instance in which most ranks wait, the one announced
    first.
    """
    ranks: Counter[Instance] = Counter(edge.instance for edge in edges)
    return min(
        edges,
        key=lambda edge: (-ranks[edge.instance], edge.op.announced_ns, edge.instance, edge.rank),
    )


def op_at(view: RankView, instance: Instance) -> Collective | None:
    """Return a rank's own record of an instance."""
    if instance.sender < 0:
        track = view.tracks.get(instance.key)
        return track.ops.get(instance.number) if track is not None else None
    peer, direction = (
        (instance.receiver, "send") if view.rank == instance.sender else (instance.sender, "recv")
    )
    ops = reversed(view.pairs.get((instance.key, peer, direction), []))
    return next((op for op in ops if op.sequence_number == instance.number), None)
