"""Who waits for whom: nodes are blocked threads, and what the waiting ends in (its sinks) is what is wrong.

Between those who wait in a collective and those whom it waits for stands the collective itself, so that the graph grows with the
number of ranks and not with its square.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from commlens.diagnosis.alignment import Mismatch
from commlens.diagnosis.heads import has_issued, is_behind, meets
from commlens.diagnosis.index import Block, View, World
from commlens.matching.error_texts import is_peer_error, is_refusal
from commlens.matching.point_to_point import pair_messages
from commlens.model.collective import ChannelKey, Collective, State

_STARTS = 64  # threads from which a shortest cycle is looked for


class Node(NamedTuple):
    """A thread that waits, or what a wait ends in."""

    kind: str  # "wait", "at"; "absent", "dead", "no-record", "elsewhere", "mismatch", "stuck"
    rank: int = -1
    detail: int = 0  # thread, or number of the mismatch or of the instance


class Instance(NamedTuple):
    """One collective of all its ranks, or one message. Orders by channel and number."""

    key: ChannelKey
    number: int
    sender: int = -1  # point-to-point only
    receiver: int = -1


@dataclass
class Edge:
    """Why one node waits for another."""

    op: Collective  # the waiting rank's
    instance: Instance
    rank: int  # who waits


@dataclass
class Graph:
    """The wait-for graph."""

    edges: dict[Node, dict[Node, Edge]] = field(default_factory=dict)
    instances: list[Instance] = field(default_factory=list)  # of "stuck" and "at" nodes, by detail
    blocks: dict[Node, Block] = field(default_factory=dict)
    back: dict[Node, set[Node]] = field(default_factory=dict)
    closed: list[list[Node]] = field(default_factory=list)  # the cycles to tell of

    def add(self, source: Node, target: Node, edge: Edge) -> None:
        """Add an edge; of several between two nodes the first is kept."""
        self.edges.setdefault(source, {}).setdefault(target, edge)
        self.edges.setdefault(target, {})
        self.back.setdefault(target, set()).add(source)

    def drop(self, source: Node, target: Node) -> None:
        """Take an edge away, and its target where nobody else waits for it."""
        del self.edges[source][target]
        self.back[target].discard(source)
        if not self.back[target] and not self.edges[target]:
            del self.edges[target]

    def sinks(self) -> list[Node]:
        """Nodes that wait for nobody."""
        return sorted(node for node, targets in self.edges.items() if not targets and node.kind not in ("wait", "at"))

    def edges_into(self, node: Node) -> list[Edge]:
        """Who waits for it directly, by rank."""
        found = []
        for source in sorted(self.back.get(node, ())):
            if source.kind == "at":
                found += [self.edges[waiting][source] for waiting in sorted(self.back.get(source, ()))]
            elif source.kind == "wait":
                found.append(self.edges[source][node])
        return sorted(found, key=lambda edge: edge.rank)

    def reaching(self, targets: Iterable[Node]) -> set[Node]:
        """All nodes whose waiting ends (also) in these."""
        seen: set[Node] = set()
        todo = list(targets)
        while todo:
            for source in self.back.get(todo.pop(), ()):
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        return seen

    def cycles(self) -> list[list[Node]]:
        """Strongly connected components of several waiting threads that nothing leads out of (Tarjan, without recursion)."""
        index: dict[Node, int] = {}
        low: dict[Node, int] = {}
        on_stack: set[Node] = set()
        stack: list[Node] = []
        found: list[list[Node]] = []
        for root in sorted(self.edges):
            if root in index:
                continue
            todo = [(root, iter(sorted(self.edges[root])))]
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
                        todo.append((target, iter(sorted(self.edges[target]))))
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
                        closed = all(target in members for member in component for target in self.edges[member])
                        loop = sum(member.kind == "wait" for member in component) > 1 or node in self.edges[node]
                        if closed and loop:
                            found.append(sorted(component))
        return found


@dataclass
class Held:
    """What holds up one collective: worked out once for all who wait in it. Ranks, in the group's order."""

    absent: list[int] = field(default_factory=list)  # have not issued it
    behind: list[int] = field(default_factory=list)  # have, and come to it only after another one in which they are stuck
    dead: list[int] = field(default_factory=list)  # came, and ended in it
    no_record: list[int] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)  # whom strict verification refused it: (announced, rank), ascending
    first_refusal_ns: int = 0
    node: Node | None = None  # once somebody waits at it


class Builder:
    """Builds the graph from the threads that are stuck."""

    def __init__(self, world: World, mismatches: list[Mismatch]) -> None:
        self.world = world
        self.graph = Graph()
        self.mismatches = mismatches
        self._by_key: dict[ChannelKey, list[int]] = {}
        self._pair_mismatchs: dict[int, int] = {}  # id of an op that met another of other size, to the mismatch
        for i, mismatch in enumerate(mismatches):
            if mismatch.pair is not None:
                for op in mismatch.pair:
                    self._pair_mismatchs[id(op)] = i
            else:
                self._by_key.setdefault(mismatch.key, []).append(i)
        self._numbers: dict[tuple[str, Instance], int] = {}
        self._known: dict[tuple[ChannelKey, int], Held] = {}
        self._todo: list[tuple[View, Block]] = []

    def build(self) -> Graph:
        """Follow every stuck thread."""
        for rank in sorted(self.world.views):
            view = self.world.views[rank]
            for thread in sorted(view.blocks):
                block = view.blocks[thread]
                if block.stuck and view.exit.kind != "own" and view.exit.kind != "gone":
                    self._todo.append((view, block))
        self._follow_all()
        self.graph.closed = self.graph.cycles()
        if self.world.foreign:
            self._look_behind_heads()
        return self.graph

    def _follow_all(self) -> None:
        while self._todo:
            self._follow(*self._todo.pop())

    def _look_behind_heads(self) -> None:
        """Keep the cycles that hold whatever else their ranks have in flight.

        What is first in flight need not be what a rank waits for: a send that nobody waits for, or a receive posted early. Only where
        the first ones alone make a circle the others count, too.
        """
        looked: set[Node] = set()
        while True:
            cycles = self.graph.cycles()
            more = [node for cycle in cycles for node in cycle if node.kind == "wait" and node not in looked]
            if not more:
                break
            for node in more:
                looked.add(node)
                view = self.world.views[node.rank]
                for op in view.heads:
                    self._part(view, node, op)
            self._follow_all()
        left = {node for cycle in cycles for node in cycle}
        self.graph.closed = [cycle for cycle in self.graph.closed if left.issuperset(cycle)]

    def _follow(self, view: View, block: Block) -> None:
        node = Node("wait", view.rank, block.thread)
        if node in self.graph.blocks or self._is_late(view, block.op):
            return
        self.graph.blocks[node] = block
        self.graph.edges.setdefault(node, {})
        parts = block.parts + view.heads if view.head_lost else block.parts
        for part in parts:
            self._part(view, node, part)
        targets = self.graph.edges[node]
        if len(parts) > 1 and any(target.kind != "stuck" for target in targets):
            for target in [target for target in targets if target.kind == "stuck"]:
                self.graph.drop(node, target)  # a batch ends as a whole: what it waits for is its other message

    def _part(self, view: View, node: Node, op: Collective) -> None:
        if op.is_point_to_point:
            self._message(view, node, op)
        elif op.sequence_number > 0:
            self._collective(view, node, op)

    def _is_late(self, view: View, op: Collective) -> bool:
        """Whether it came when others had been refused because of that: nobody holds it up, it did."""
        if not is_refusal(op.error) or op.is_point_to_point or op.state is not State.FAILED:
            return False
        first = self._held(op.channel.key, op.sequence_number, op.announced_ns).first_refusal_ns
        return 0 < first < op.announced_ns

    # --- collectives

    def _collective(self, view: View, node: Node, op: Collective) -> None:
        key = op.channel.key
        track = view.tracks.get(key)
        numbers = [n for n in (track.open if track else []) if n < op.sequence_number]
        # What is behind another one that is not complete waits for that one.
        for number in [*numbers, op.sequence_number]:
            if self._at(view, node, key, number, last=number == op.sequence_number):
                return

    def _at(self, view: View, node: Node, key: ChannelKey, number: int, *, last: bool) -> bool:
        """Add the edges of one collective. False where nothing holds it up and it is not the last candidate."""
        op = view.tracks[key].ops[number]
        edge = Edge(op, Instance(key, number), view.rank)
        held = self._held(key, number, op.announced_ns)
        mismatch = self._mismatch(key, number, held.absent)
        if mismatch is not None:
            self.graph.add(node, Node("mismatch", -1, mismatch), edge)
            return True
        if is_refusal(op.error) and op.state is State.FAILED and op.done_ns > 0:
            late = [rank for _, rank in held.refused[bisect_right(held.refused, (op.done_ns, 1 << 62)) :]]
            for member in late:
                self.graph.add(node, Node("absent", member), edge)
            if late:
                return True
        others_behind = held.behind and held.behind != [view.rank]
        if not (held.absent or others_behind or last):
            return False
        if held.node is None:
            held.node = self._arrive(key, number, held, edge)
        self.graph.add(node, held.node, edge)
        return True

    def _arrive(self, key: ChannelKey, number: int, held: Held, edge: Edge) -> Node:
        """The node that stands for a collective, with what it waits for."""
        if not (held.absent or held.behind or held.dead or held.no_record):
            return Node("stuck", -1, self._number("stuck", edge.instance))
        at = Node("at", -1, self._number("at", edge.instance))
        for member in held.absent:
            self._to_absent(at, self.world.views[member], key, edge)
        for member in held.behind:
            self._to_thread(at, self.world.views[member], key, edge)
        if held.absent or held.behind:
            return at
        for member in held.dead:
            self.graph.add(at, Node("dead", member), edge)
        if not held.dead:
            for member in held.no_record:
                self.graph.add(at, Node("no-record" if member in self.world.unrecorded else "elsewhere", member), edge)
        return at

    def _number(self, kind: str, instance: Instance) -> int:
        number = self._numbers.setdefault((kind, instance), len(self.graph.instances))
        if number == len(self.graph.instances):
            self.graph.instances.append(instance)
        return number

    def _held(self, key: ChannelKey, number: int, since_ns: int) -> Held:
        """Sort a collective's ranks by where they are."""
        held = self._known.get((key, number))
        if held is not None:
            return held
        held = self._known[(key, number)] = Held()
        for member in key[2]:
            other = self.world.views.get(member)
            if other is None:
                held.no_record.append(member)
                continue
            theirs = other.tracks.get(key)
            if theirs is None or theirs.last < number:
                if has_issued(other, key, number, since_ns) is False:
                    held.absent.append(member)
                continue  # else its record is gone
            met = theirs.ops.get(number)
            if met is not None and met.state is State.FAILED:
                if is_refusal(met.error):
                    held.refused.append((met.announced_ns, member))
                    if met.done_ns > 0:
                        held.first_refusal_ns = min(held.first_refusal_ns or met.done_ns, met.done_ns)
                elif not is_peer_error(met.error):
                    held.absent.append(member)
                    continue
            if (theirs.open and theirs.open[0] < number) or (met is not None and is_behind(other, met)):
                held.behind.append(member)
            elif met is not None and met.state is not State.COMPLETED and other.exit.kind in ("own", "gone"):
                held.dead.append(member)
        held.refused.sort()
        return held

    def _mismatch(self, key: ChannelKey, number: int, absent: list[int]) -> int | None:
        for i in self._by_key.get(key, ()):
            if self.mismatches[i].explains(self.world, number, absent):
                return i
        return None

    def _to_stuck(self, node: Node, edge: Edge) -> None:
        self.graph.add(node, Node("stuck", -1, self._number("stuck", edge.instance)), edge)

    # --- point to point

    def _message(self, view: View, node: Node, op: Collective) -> None:
        key = op.channel.key
        if op.peer is None:
            self._any_source(view, node, op)
            return
        sender, receiver = (view.rank, op.peer) if op.op == "send" else (op.peer, view.rank)
        edge = Edge(op, Instance(key, op.sequence_number, sender, receiver), view.rank)
        mismatch = self._pair_mismatchs.get(id(op))
        if mismatch is not None:
            self.graph.add(node, Node("mismatch", -1, mismatch), edge)
            return
        other = self.world.views.get(op.peer)
        if other is None:
            self.graph.add(node, Node("no-record" if op.peer in self.world.unrecorded else "elsewhere", op.peer), edge)
            return
        match = meets(view, other, key, op) if self.world.foreign else self._match(view, other, key, op)
        if match is not None and self.world.foreign:
            sent = op if op.op == "send" else match
            edge = Edge(op, Instance(key, sent.sequence_number, sender, receiver), view.rank)
        if match is None:
            self._to_absent(node, other, key, edge)
        elif is_behind(other, match):
            self._to_thread(node, other, key, edge)
        elif other.exit.kind in ("own", "gone"):
            self.graph.add(node, Node("dead", other.rank), edge)
        elif _waits_for_more(other, view.rank):
            self._to_thread(node, other, key, edge)  # it came, in a batch that waits for another message
        elif not is_behind(view, op) and not _waits_for_more(view, other.rank):
            self._to_stuck(node, edge)

    def _match(self, view: View, other: View, key: ChannelKey, op: Collective) -> Collective | None:
        mine = view.pairs.get((key, other.rank, op.op), [])
        theirs = other.pairs.get((key, view.rank, "recv" if op.op == "send" else "send"), [])
        complete = not (view.wrapped or other.wrapped)
        if op.op == "send":
            pairs = pair_messages(mine, theirs, complete=complete)
            met = next((recv for send, recv in pairs if send is op), None)
            any_source = other.pairs.get((key, -1, "recv"), [])
            return met or (any_source[-1] if any_source and any_source[-1].index in other.open_pairs else None)
        pairs = pair_messages(theirs, mine, complete=complete)
        return next((send for send, recv in pairs if recv is op), None)

    def _any_source(self, view: View, node: Node, op: Collective) -> None:
        """A receive from whoever sends: it waits for all others of its group, though one would do."""
        key = op.channel.key
        for member in key[2]:
            other = self.world.views.get(member)
            if member != view.rank and other is not None:
                edge = Edge(op, Instance(key, op.sequence_number, member, view.rank), view.rank)
                self._to_absent(node, other, key, edge)

    # --- ranks that are not there

    def _to_absent(self, node: Node, other: View, key: ChannelKey, edge: Edge) -> None:
        if other.exit.kind in ("own", "gone"):
            self.graph.add(node, Node("dead", other.rank), edge)
        else:
            self._to_thread(node, other, key, edge)

    def _to_thread(self, node: Node, other: View, key: ChannelKey, edge: Edge) -> None:
        """To the thread that should issue it, or the rank where that one is not blocked."""
        block = self._block_of(other, key)
        if block is None:
            self.graph.add(node, Node("absent", other.rank), edge)
            return
        target = Node("wait", other.rank, block.thread)
        self.graph.add(node, target, edge)
        self._todo.append((other, block))

    def _block_of(self, other: View, key: ChannelKey) -> Block | None:
        """What the thread is blocked in that uses this channel; the main thread where none has used it."""
        stuck = {thread: block for thread, block in other.blocks.items() if block.stuck}
        if not stuck:
            return None
        track = other.tracks.get(key)
        thread = track.thread if track is not None and track.thread else self._pair_thread(other, key) or other.main_thread
        if thread in stuck:
            return stuck[thread]
        stack = next((s for s in other.log.stacks if s.thread == thread), None)
        if thread != other.main_thread and (stack is None or not stack.frames):
            # An autograd thread has no Python stack: what holds it up is the main thread.
            return stuck.get(other.main_thread) or (next(iter(stuck.values())) if len(stuck) == 1 else None)
        if _waits_for_a_thread(stack.frames if stack is not None else ()):
            return next(iter(stuck.values()))
        return None

    def _pair_thread(self, other: View, key: ChannelKey) -> int:
        last = max((ops[-1] for pair, ops in other.pairs.items() if pair[0] == key), key=lambda op: op.index, default=None)
        return last.issue_thread if last is not None else 0


def _waits_for_more(view: View, peer: int) -> bool:
    """Whether a rank of another tool's dump is stuck in a batch that also has messages with others than this one."""
    head = view.blocks.get(0) if view.columns is not None else None
    return head is not None and any(part.peer != peer for part in head.parts)


def _waits_for_a_thread(frames: tuple[object, ...]) -> bool:
    """Whether a thread sits in a join, or in a lock or future of Python's: it may wait for another thread of its process."""
    for frame in frames[:3]:
        file, function = getattr(frame, "file", ""), getattr(frame, "function", "")
        if file.endswith(("threading.py", "concurrent/futures/_base.py")) and function in ("join", "_wait_for_tstate_lock", "result"):
            return True
    return False


def edges_of(graph: Graph, component: Iterable[Node]) -> list[tuple[Node, Node, Edge]]:
    """A shortest cycle through a component, waiting thread by waiting thread, starting at its smallest."""
    members = set(component)
    best: list[Node] = []
    for start in sorted(node for node in members if node.kind == "wait")[:_STARTS]:
        path = _shortest_cycle(graph, members, start)
        if path and (not best or len(path) < len(best)):
            best = path
    if not best:
        return []
    waiting = [(i, node) for i, node in enumerate(best) if node.kind == "wait"]
    following = [*best[1:], best[0]]
    return [(node, waiting[(k + 1) % len(waiting)][1], graph.edges[node][following[i]]) for k, (i, node) in enumerate(waiting)]


def _shortest_cycle(graph: Graph, members: set[Node], start: Node) -> list[Node]:
    parents: dict[Node, Node] = {}
    level = [start]
    while level:
        following: list[Node] = []
        for node in level:
            for target in sorted(graph.edges[node]):
                if target == start:
                    path = [node]
                    while path[-1] != start:
                        path.append(parents[path[-1]])
                    path.reverse()
                    return path
                if target in members and target not in parents:
                    parents[target] = node
                    following.append(target)
        level = following
    return []
