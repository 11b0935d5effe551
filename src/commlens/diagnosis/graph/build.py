"""Build the wait-for graph: start at each stuck thread, and add an edge to each rank or thread that
it waits for.

Say ranks 0 and 1 wait in ``all_reduce #7``, and rank 2 has not issued it, because it waits for a
message of rank 3, which loads data. Then::

    wait 0 --> at all_reduce #7 --> wait 2 --> absent 3
    wait 1 ------^

Of each thread, the edge is found from its op: a collective waits for the ranks that have not issued
it, a message for its peer, a key of the store for its writer. A rank that is stuck itself becomes
the node of its thread, which is followed in turn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field

from commlens.diagnosis.align.alignment import RecordMismatch, from_any, pair_with_any_source
from commlens.diagnosis.graph.wait_graph import Edge, Graph, Instance, WaitNode, expected_writer
from commlens.diagnosis.index.job_index import (
    BlockedThread,
    JobIndex,
    RankView,
    Track,
    find_counterpart,
    has_issued,
    is_queued,
    lacks,
    lost_count,
)
from commlens.matching.error_texts import is_peer_error, is_refusal
from commlens.model.collective import ChannelKey, Collective, State
from commlens.model.grouping import grouped

_EDGES_MAX = 1_000_000
_EDGES_PER_RANK = 64
"""The graph may have as many edges as both allow together; beyond, it is incomplete.

The product of ranks and different collectives is small in a real hang, since all ranks wait in a
few. In damaged or mixed evidence, each rank may wait in one of its own.
"""


def build_wait_graph(job: JobIndex, mismatches: list[RecordMismatch]) -> Graph:
    """Return the wait-for graph of all stuck threads. The details of its "mismatch" nodes are
    indices into ``mismatches``.
    """
    return _GraphBuilder(job, mismatches).build()


@dataclass
class _Arrivals:
    """The ranks that a collective waits for, in the group's order: if rank 2 has not issued it and
    rank 3 has enqueued it behind an op that hangs, ``absent=[2]`` and ``behind=[3]``. Determined
    once for all threads that wait in it.
    """

    absent: list[int] = field(default_factory=list)  # have not issued it, or failed in it
    # are stuck in an op that comes before it, on their device or in their program
    behind: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)  # died in it
    # have no record, or none of what they did last
    no_record: list[int] = field(default_factory=list)
    # raised in it under strict verification: (announced_ns, rank), ascending
    refused: list[tuple[int, int]] = field(default_factory=list)
    first_refusal_ns: int = 0
    node: WaitNode | None = None  # once a thread waits at it

    def add_without_record(self, other: RankView, issued: bool | None, until_ns: int) -> None:
        """Add a rank whose records end before the collective, or do not hold it.

        Args:
            other: the rank.
            issued: the answer of :func:`has_issued`.
            until_ns: when the last of the other ranks issued it.
        """
        is_older = other.is_older_than(until_ns)
        if issued is False and not is_older:
            self.absent.append(other.rank)
        elif issued is not True and (other.is_log or other.lost_newest or is_older):
            # What blocks the rank of another tool's dump is among its oldest entries in flight,
            # which were read.
            is_dump = other.dump is not None and not other.is_log
            blocked = is_dump and any(block.stuck for block in other.blocks.values())
            (self.behind if blocked else self.no_record).append(other.rank)
        # else the rank has issued it, or its record may be overwritten

    def add_met(self, other: RankView, op: Collective) -> None:
        """Add a rank by its own record of the collective."""
        if op.state is State.FAILED and is_refusal(op.error):
            self.refused.append((op.announced_ns, other.rank))
            if op.done_ns > 0:
                self.first_refusal_ns = min(self.first_refusal_ns or op.done_ns, op.done_ns)
        elif op.state is State.FAILED and not is_peer_error(op.error):
            self.absent.append(other.rank)
            return
        if is_queued(other, op):
            self.behind.append(other.rank)
        elif op.state is not State.COMPLETED and other.died:
            self.dead.append(other.rank)


class _GraphBuilder:
    """Follows threads to what they wait for, and collects the nodes and edges on the way."""

    def __init__(self, job: JobIndex, mismatches: list[RecordMismatch]) -> None:
        self.job = job
        self.graph = Graph(unlisted=job.unlisted)
        self.mismatches = mismatches
        # the indices of mismatches: of collectives, and of messages by id of the send and receive
        self._mismatches_by_channel = grouped(
            (mismatch.key, i) for i, mismatch in enumerate(mismatches) if mismatch.pair is None
        )
        self._pair_mismatches = {
            id(op): i for i, mismatch in enumerate(mismatches) for op in mismatch.pair or ()
        }
        self._instance_indices: dict[tuple[str, Instance], int] = {}
        self._arrivals_of: dict[Instance, _Arrivals] = {}
        self._todo: list[tuple[RankView, BlockedThread]] = []  # threads to follow
        self._members = 0  # of all collectives in self._arrivals_of
        self._members_max = _EDGES_MAX + _EDGES_PER_RANK * len(job.views)

    def build(self) -> Graph:
        """Follow every stuck thread of the processes that have not died. Where all processes have
        ended, those of which nobody saw how did wait, and then were ended.
        """
        all_ended = all(view.exit.ended for view in self.job.views.values())
        for _, view in sorted(self.job.views.items()):
            if not view.died or (all_ended and view.exit.kind == "gone"):
                blocks = (view.blocks[thread] for thread in sorted(view.blocks))
                self._todo += [(view, block) for block in blocks if block.stuck]
        self._follow_all()
        self.graph.deadlocks = self.graph.find_cycles()
        if any(view.head is not None for view in self.job.views.values()):
            self._confirm_cycles()
        return self.graph

    def _follow_all(self) -> None:
        while self._todo and self._members <= self._members_max:
            self._follow(*self._todo.pop())
        if self._todo:
            self.graph.incomplete = True
            self._todo.clear()

    def _confirm_cycles(self) -> None:
        """Drop the cycles that other ops in flight of their ranks can break.

        The first op in flight need not block its rank: it may be a send that no thread waits for,
        or a receive posted early. So add the edges of the other ops of the ranks in a cycle, and
        keep the cycles that are still closed.
        """
        expanded: set[WaitNode] = set()
        while True:
            inside = [node for cycle in self.graph.find_cycles() for node in cycle]
            more = [node for node in inside if node.kind == "wait" and node not in expanded]
            if not more:
                break
            expanded.update(more)
            for node in more:
                view = self.job.views[node.rank]
                for op in view.heads:
                    self._follow_op(view, node, op)
            self._follow_all()
        # Among the entries of a rank that could not be read, one may break the cycle.
        lost = {node for node in expanded if self.job.views[node.rank].lost_newest}
        closed = {*inside} - lost if not self.graph.incomplete else set()
        self.graph.deadlocks = [cycle for cycle in self.graph.deadlocks if closed.issuperset(cycle)]

    def _follow(self, view: RankView, block: BlockedThread) -> None:
        """Add the node of a blocked thread, and its edges."""
        node = WaitNode("wait", view.rank, block.thread)
        if node in self.graph.blocks or self._caused_refusals(block.op):
            return
        self.graph.blocks[node] = block
        self.graph.edges.setdefault(node, {})
        parts = block.parts + view.heads if view.head_lost else block.parts
        for part in parts:
            self._follow_op(view, node, part)
        targets = self.graph.edges[node]
        if len(parts) > 1 and any(target.kind != "stuck" for target in targets):
            for target in [target for target in targets if target.kind == "stuck"]:
                # a batch completes as a whole, so it waits for its other messages
                self.graph.drop(node, target)

    def _follow_op(self, view: RankView, node: WaitNode, op: Collective) -> None:
        if op.is_point_to_point:
            self._follow_message(view, node, op)
        elif op.is_store_wait:
            self._follow_key(view, node, op)
        elif op.sequence_number > 0:
            self._follow_collective(view, node, op)

    def _caused_refusals(self, op: Collective) -> bool:
        """Return whether a rank was refused only because its peers had been before, as it had not
        arrived: then its wait is no victim's.
        """
        if not is_refusal(op.error) or op.is_point_to_point or op.state is not State.FAILED:
            return False
        first = self._arrivals(Instance.of(op)).first_refusal_ns
        return 0 < first < op.announced_ns

    # --- collectives

    def _follow_collective(self, view: RankView, node: WaitNode, op: Collective) -> None:
        """Add the edges to what holds up a collective, or to what holds up an earlier one of its
        channel: an op behind an incomplete one waits for that one.
        """
        track = view.tracks.get(op.channel.key) or Track()
        earlier = [track.ops[number] for number in track.open if number < op.sequence_number]
        for candidate in [*earlier, op]:
            edge = self._edge(candidate, view)
            arrivals = self._arrivals(edge.instance)
            targets = self._held_up_by(edge, arrivals)
            if targets:
                break
        for target in targets or [self._collective_node(edge, arrivals)]:
            self.graph.add(node, target, edge)

    def _edge(self, op: Collective, view: RankView) -> Edge:
        return Edge(op, Instance.of(op), view.rank, self.job.stands_for.get(view.rank, 0))

    def _held_up_by(self, edge: Edge, arrivals: _Arrivals) -> list[WaitNode]:
        """Return what holds up the waiting rank's collective: the mismatch that explains it, the
        ranks that came too late for strict verification, or the node of the collective. Empty if
        no other rank holds it up.
        """
        op, (key, number, *_) = edge.op, edge.instance
        for i in self._mismatches_by_channel.get(key, ()):
            if self.mismatches[i].explains(number, arrivals.absent):
                return [WaitNode("mismatch", -1, i)]
        if is_refusal(op.error) and op.state is State.FAILED and op.done_ns > 0:
            # the ranks that came only after this one had been refused
            came = bisect_right(arrivals.refused, op.done_ns, key=lambda each: each[0])
            if late := arrivals.refused[came:]:
                return [WaitNode("absent", member) for _, member in late]
        if arrivals.absent or (arrivals.behind and arrivals.behind != [edge.rank]):
            return [self._collective_node(edge, arrivals)]
        return []

    def _collective_node(self, edge: Edge, arrivals: _Arrivals) -> WaitNode:
        """Return the node of a collective. The first edge to it adds the edges to the ranks that it
        waits for.
        """
        if arrivals.node is not None:
            return arrivals.node
        waits = arrivals.absent or arrivals.behind or arrivals.dead or arrivals.no_record
        at = arrivals.node = self._instance_node("at" if waits else "stuck", edge.instance)
        for member in arrivals.absent:
            self._wait_for_rank(at, self.job.views[member], edge)
        for member in arrivals.behind:
            self._wait_for_device(at, self.job.views[member], edge)
        if not (arrivals.absent or arrivals.behind):
            for member in arrivals.dead:
                self.graph.add(at, WaitNode("dead", member), edge)
            for member in arrivals.no_record if not arrivals.dead else ():
                self.graph.add(at, self._unrecorded_node(member), edge)
        return at

    def _unrecorded_node(self, rank: int) -> WaitNode:
        return WaitNode("no-record" if rank in self.job.unrecorded else "elsewhere", rank)

    def _instance_node(self, kind: str, instance: Instance) -> WaitNode:
        index = self._instance_indices.setdefault((kind, instance), len(self.graph.instances))
        if index == len(self.graph.instances):
            self.graph.instances.append(instance)
        return WaitNode(kind, -1, index)

    def _arrivals(self, instance: Instance) -> _Arrivals:
        """Sort the ranks of a collective by their progress towards it."""
        known = self._arrivals_of.get(instance)
        if known is not None:
            return known
        key, number, *_ = instance
        arrivals = self._arrivals_of[instance] = _Arrivals()
        self._members += len(key[2])
        views = [self.job.views[member] for member in key[2] if member in self.job.views]
        ops = [view.op_at(key, number) for view in views]
        issued_ns = [op.announced_ns for op in ops if op is not None]
        first_ns, last_ns = min(issued_ns, default=0), max(issued_ns, default=0)
        for view, op in zip(views, ops, strict=True):
            if op is None:
                issued = has_issued(view, key, number, first_ns)
                arrivals.add_without_record(view, issued, last_ns)
            elif not lost_count(view, key, number):
                arrivals.add_met(view, op)
        arrivals.no_record += sorted(set(key[2]) - self.job.views.keys())
        # In logs, a rank that prints nothing is not missing.
        if key in self.job.unlisted and not self.job.views[self.job.users[key][0]].is_log:
            # it may be one of the group
            arrivals.no_record += [rank for rank in self.job.no_record if rank not in key[2]]
        arrivals.refused.sort()
        return arrivals

    # --- keys of the store

    def _follow_key(self, view: RankView, node: WaitNode, op: Collective) -> None:
        """Add the edge to the rank that should write a key, if the records show it; else to the
        key.
        """
        edge = self._edge(op, view)
        writer = expected_writer(self.job, op)
        if writer is None:
            self.graph.add(node, self._instance_node("key", edge.instance), edge)
        elif writer in self.job.views:
            other = self.job.views[writer]
            # a wait of the writer for this rank never ends: it is stuck, however short
            for block in other.blocks.values():
                block.stuck = block.stuck or any(lacks(view, part) for part in block.parts)
            self._wait_for_rank(node, other, edge)
        else:
            self.graph.add(node, self._unrecorded_node(writer), edge)

    # --- point to point

    def _follow_message(self, view: RankView, node: WaitNode, op: Collective) -> None:
        """Add the edge to what holds up a message: its mismatch, its peer, or the message itself if
        both sides have issued it.
        """
        key = op.channel.key
        if op.peer is None:
            self._follow_any_source(view, node, op)
            return
        sender, receiver = (view.rank, op.peer) if op.op == "send" else (op.peer, view.rank)
        edge = Edge(op, Instance(key, op.sequence_number, sender, receiver), view.rank)
        mismatch = self._pair_mismatches.get(id(op))
        if mismatch is not None:
            self.graph.add(node, WaitNode("mismatch", -1, mismatch), edge)
            return
        other = self.job.views.get(op.peer)
        if other is None:
            self.graph.add(node, self._unrecorded_node(op.peer), edge)
            return
        if not self.job.foreign:
            match = self._find_match(view, other, key, op)
        else:
            match = find_counterpart(view, other, key, op)
            sent = op if op.op == "send" or match is None else match
            edge = Edge(op, Instance(key, sent.sequence_number, sender, receiver), view.rank)
        if match is None:  # the peer has not issued its side
            self._wait_for_rank(node, other, edge)
        elif is_queued(other, match):
            self._wait_for_device(node, other, edge)
        elif other.died:
            self.graph.add(node, WaitNode("dead", other.rank), edge)
        elif _waits_for_more(other, match, view.rank):
            # it has arrived, in a batch that waits for another message
            self._wait_for_device(node, other, edge)
        elif not is_queued(view, op) and not _waits_for_more(view, op, other.rank):
            self.graph.add(node, self._instance_node("stuck", edge.instance), edge)

    def _find_match(
        self, view: RankView, other: RankView, key: ChannelKey, op: Collective
    ) -> Collective | None:
        """Return the other side of a message; None if the peer has not issued it."""
        if not op.sequence_number:  # of a batch: the peer's newest one may be the other side
            back = "recv" if op.op == "send" else "send"
            theirs = other.pairs.get((key, view.rank, back), [])
            return theirs[-1] if theirs and theirs[-1].index in other.open_pairs else None
        if op.op == "recv":
            pairs = pair_with_any_source(other, view, key)
            return next((send for send, recv in pairs if recv is op), None)
        pairs = pair_with_any_source(view, other, key)
        # a receive from any source that is still in flight may take it
        last = next(reversed(from_any(other, key)), None)
        met = next((recv for send, recv in pairs if send is op), None)
        return met or (last if last is not None and last.index in other.open_pairs else None)

    def _follow_any_source(self, view: RankView, node: WaitNode, op: Collective) -> None:
        """Follow a receive from any source: it waits for all other ranks of its group, though one
        would do. Ranks that have finished count only if all others have.
        """
        key = op.channel.key
        views = self.job.views
        others = [views[member] for member in key[2] if member != view.rank and member in views]
        running = [other for other in others if other.exit.kind not in ("clean", "leaving")]
        for other in running or others:
            edge = Edge(op, Instance(key, op.sequence_number, other.rank, view.rank), view.rank)
            self._wait_for_rank(node, other, edge)

    # --- absent ranks

    def _wait_for_rank(self, node: WaitNode, other: RankView, edge: Edge) -> None:
        """Add the edges to the threads that hold up a rank's side; to the rank itself if it has
        died, or if no such thread is blocked.
        """
        if other.died:
            self.graph.add(node, WaitNode("dead", other.rank), edge)
            return
        # if a group has no other known rank, it is unknown for which rank a thread waits there
        blocks = [
            block
            for block in _blocks_of(other, edge.instance.key)
            if not self.graph.is_unknown(block.op.channel.key)
        ]
        if not blocks:
            unknown = other.lost_newest or other.is_older_than(edge.op.announced_ns)
            absent = WaitNode("absent", other.rank)
            self.graph.add(node, self._unrecorded_node(other.rank) if unknown else absent, edge)
        for block in blocks:
            self._wait_for_block(node, other, block, edge)

    def _wait_for_device(self, node: WaitNode, other: RankView, edge: Edge) -> None:
        """Add the edge to what holds up a rank's device: the awaited op is queued behind it."""
        if other.head is not None and other.head.stuck:
            self._wait_for_block(node, other, other.head, edge)
        else:
            self._wait_for_rank(node, other, edge)

    def _wait_for_block(
        self, node: WaitNode, other: RankView, block: BlockedThread, edge: Edge
    ) -> None:
        self.graph.add(node, WaitNode("wait", other.rank, block.thread), edge)
        self._todo.append((other, block))


def _blocks_of(view: RankView, key: ChannelKey) -> list[BlockedThread]:
    """Return the blocks that keep a rank from issuing on a channel: that of the thread which issues
    there, or of the threads which that one may wait for.
    """
    stuck = {
        thread: block
        for thread, block in view.blocks.items()
        if block.stuck and block.how != "unknown"
    }
    if not stuck:
        return []
    thread = _thread_of(view, key)
    if thread in stuck:
        return [stuck[thread]]
    stack = {each.thread: each for each in view.log.stacks if each.frames}.get(thread)
    if stack is not None and stack.waits_for_thread:
        return [*stuck.values()]  # for the end or the result of one of them
    if stack is None and view.main_thread in stuck:
        # An autograd thread has no Python stack: its main thread holds it up.
        return [stuck[view.main_thread]]
    may_wait = thread != view.main_thread if stack is None else _others_wait_for_locks(view, stuck)
    return [*stuck.values()] if may_wait and len(stuck) == 1 else []


def _others_wait_for_locks(view: RankView, stuck: Collection[int]) -> bool:
    """Return whether only the stuck threads can release the locks that all others wait for."""
    return all(each.in_lock or each.thread in stuck for each in view.log.stacks)


def _thread_of(view: RankView, key: ChannelKey) -> int:
    """Return the thread that last issued on a channel; the main thread if none has."""
    track = view.tracks.get(key)
    if track is not None and track.thread:
        return track.thread
    sent = (ops[-1] for pair, ops in view.pairs.items() if pair[0] == key)
    last = max(sent, key=lambda op: op.index, default=None)
    return (last.issue_thread if last is not None else 0) or view.main_thread


def _waits_for_more(view: RankView, message: Collective, peer: int) -> bool:
    """Return whether the batch in which a rank's device is stuck holds this message, and messages
    with other peers.
    """
    parts = view.head.parts if view.head is not None else []
    return any(part.index == message.index for part in parts) and any(
        part.peer != peer for part in parts
    )
