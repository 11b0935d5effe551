"""Evidence that this node asks the other nodes for, and that it is asked for.

The node that reports puts a request into its beat. Each node answers under a key of its own, with
its ranks' black boxes, or with the states of its ranks, which are summed along a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from commlens.watch.nodes.beat import LAST, Beat, Request, key
from commlens.watch.nodes.meeting_places import Client, stored
from commlens.watch.nodes.nodes_in_sight import NodesInSight
from commlens.watch.nodes.periods import BUSY_PERIOD_S, busy_period_s
from commlens.watch.nodes.states import Collecting, States
from commlens.watch.nodes.states_tree import Tree

GATHER_S: Final = 3.0  # to wait for evidence; more with many nodes

Answer = TypeVar("Answer")


class Gathering(NodesInSight):
    """The requests for evidence of this node and of others, and their answers. The arguments are
    those of :class:`NodesInSight`.
    """

    def _reset(self) -> None:
        super()._reset()
        # evidence that this node is asked for
        self._asked: Request | None = None
        self._asked_at = 0.0  # time.monotonic() at which it was seen last; 0.0: never
        self._evidence: bytes | None = None  # to be stored
        self._collecting: Collecting | None = None  # states, from the nodes below in the tree
        # evidence that this node has asked for
        self._gathering = False
        self._gathered: dict[int, bytes] = {}  # by slot
        self._from_root: Collecting | None = None  # states, from the root of the tree

    # --- asked by another node

    def take_request(self) -> Request | None:
        """Return the request for evidence that this node must answer, only once."""
        with self._changed:
            request, self._asked = self._asked, None
        return request

    def answer(self, request: Request, evidence: bytes | States) -> None:
        """Store this node's evidence, or the states of its ranks with those of the nodes below in
        the tree.
        """
        with self._changed:
            if isinstance(evidence, bytes):
                self._evidence = evidence
            elif self._collecting is not None and self._collecting.request.id == request.id:
                self._collecting.add_own(evidence)
            if self._asked == request:  # it was seen again while it was answered
                self._asked = None
            self._mine = msgspec.structs.replace(self._mine, answered=request.id)
        self._poke.set()

    def _note_requests(self, beats: Sequence[Beat], now: float) -> None:
        """Note a request of the reporter for the watcher to take. It stays in the reporter's beat
        until the next request, so it is seen again and again. Called with the lock.
        """
        mine = self._mine
        for beat in beats:
            request = beat.asked
            # for a moment, two nodes may both mean to report
            may_ask = mine.shares_incarnation(beat) and beat.order < mine.order
            if request is None or not may_ask or not request.concerns(mine.slot):
                continue
            if request.id == mine.answered:
                continue
            is_known = self._collecting is not None and self._collecting.request.id == request.id
            if request.tree is not None and not is_known:
                period_s = busy_period_s(self._known.count)
                self._collecting = Collecting(request, mine.slot, began=now, period_s=period_s)
            self._asked, self._asked_at = request, now

    # --- asked by this node

    def _ask(self, **what: Any) -> Request:
        """Put a request into this node's beat. Called with the lock."""
        number = self._mine.asked.number + 1 if self._mine.asked is not None else 1
        request = Request(number, self._mine.slot, **what)
        self._mine = msgspec.structs.replace(self._mine, asked=request)
        self._poke.set()
        return request

    def begin_gather(self, of: Sequence[int] = (), records: int = 0) -> list[Beat]:
        """Ask the other nodes for their evidence, without waiting for it. Returns those asked. The
        arguments are those of :meth:`gather`.
        """
        asked = [beat for beat in self.others if not of or beat.slot in of]
        with self._changed:
            self._gathering, self._gathered = True, {}
            if asked:
                self._ask(nodes=list(of), records=records)
        return asked

    def gather(
        self,
        read: Callable[[int, bytes], Answer],
        *,
        of: Sequence[int] = (),
        records: int = 0,
        timeout_s: float | None = None,
        asked: Sequence[Beat] | None = None,
    ) -> tuple[dict[int, Answer], list[Beat]]:
        """Ask the other nodes for their evidence, and read each answer while others are on their
        way.

        Args:
            read: reads the evidence of the node with this slot; called without a lock.
            of: the slots of the nodes to ask; empty: all.
            records: how many of each rank's newest records to ask for; 0: as many as the size of
                the job allows.
            timeout_s: how long to wait for the answers; None: as long as they may take.
            asked: the nodes that :meth:`begin_gather` has asked; None: ask now.

        Returns:
            The evidence by slot, in the order of the slots, and the nodes that did not answer in
            time.
        """
        if asked is None:
            asked = self.begin_gather(of, records)
        if timeout_s is None:
            timeout_s = GATHER_S + busy_period_s(self._known.count) - BUSY_PERIOD_S
        end = time.monotonic() + timeout_s
        found: dict[int, tuple[bytes, Answer]] = {}
        is_last = False
        while not is_last:
            contents, is_last = self._wait_for_answers(asked, more_than=len(found), end=end)
            for slot, content in contents.items():
                # a node that leaves may replace its answer by its last evidence
                if slot not in found or found[slot][0] is not content:
                    found[slot] = (content, read(slot, content))
        silent = [beat for beat in asked if beat.slot not in contents]
        return {slot: found[slot][1] for slot in sorted(contents)}, silent

    def _wait_for_answers(
        self, asked: Sequence[Beat], *, more_than: int, end: float
    ) -> tuple[dict[int, bytes], bool]:
        """Wait until there are more than ``more_than`` answers. Return the evidence so far by slot,
        and whether no more is expected: then with that of nodes that have left.
        """
        with self._changed:
            while True:
                left = end - time.monotonic()
                if (
                    left <= 0
                    or self._contact.refuses
                    or all(
                        beat.slot in self._gathered or beat.slot in self._known.last_evidence
                        for beat in asked
                    )
                ):
                    self._gathering = False
                    return {**self._known.evidence_left(self._mine), **self._gathered}, True
                if len(self._gathered) > more_than:
                    return dict(self._gathered), False
                self._changed.wait(left)

    def gather_states(self, own: States) -> States | None:
        """Ask the other nodes for the states of their ranks, which is less than their evidence: in
        a large job it shows first where to look. The nodes form a tree, in which each adds up the
        states of those below, so that no node reads those of all.

        Returns:
            The states that came in time, with this node's own. None if the nodes cannot form a
            tree, because too many slots belong to nodes that have gone.
        """
        slots = {self._mine.slot, *(beat.slot for beat in self.others)}
        tree = Tree.of(slots, self._known.count)
        if tree is None:
            return None
        with self._changed:
            now, period_s = time.monotonic(), busy_period_s(self._known.count)
            request = self._ask(tree=tree)
            # this node takes part as any other, and also waits for the sum of the root
            self._collecting = Collecting(request, request.slot, began=now, period_s=period_s)
            self._collecting.add_own(own)
            self._from_root = root = Collecting(request, None, began=now, period_s=period_s)
            while not root.is_complete(time.monotonic()) and not self._contact.refuses:
                self._changed.wait(BUSY_PERIOD_S)
            self._from_root = None
        joined = root.copy()
        joined.add(own)
        return joined

    # --- in the thread of the exchange

    @property
    def _awaits_evidence(self) -> bool:
        """Whether evidence of other nodes is on its way, so that the thread looks often."""
        collects = self._collecting is not None and not self._collecting.is_done
        return collects or self._gathering or self._from_root is not None

    def _collect(self, client: Client) -> None:
        """Read the states that the nodes below have stored, and store the sum once all have."""
        for collecting in (self._collecting, self._from_root):
            if collecting is not None and not collecting.is_done:
                collecting.collect(client)
                with self._changed:
                    self._changed.notify_all()

    def _read_evidence(self, client: Client, beats: Sequence[Beat]) -> None:
        """Read the answers to the last request, and the evidence of nodes that have left."""
        with self._changed:
            # gather() may have asked again since this node's value was stored
            asked = self._mine.asked
            known = set(self._gathered)
            left = [
                beat.slot
                for beat in beats
                if beat.answered == LAST.id and beat.slot not in self._known.last_evidence
            ]
        wanted = self._answered(client, asked, beats, known) if asked is not None else []
        if not wanted and not left:
            return
        values = client.get([key("evidence", other) for other in [*wanted, *left]])
        with self._changed:
            if asked is self._mine.asked:
                self._gathered.update(zip(wanted, values, strict=False))
            self._known.last_evidence.update(zip(left, values[len(wanted) :], strict=True))
            self._changed.notify_all()

    def _answered(
        self, client: Client, asked: Request, beats: Sequence[Beat], known: set[int]
    ) -> list[int]:
        """Return the nodes that have stored their evidence since, none of the ``known`` ones. If
        few were asked, read the id of the request that each has answered, which costs less than to
        read all beats.
        """
        if asked.tree is not None:
            return []
        if not asked.nodes:
            answered = [beat.slot for beat in beats if beat.answered == asked.id]
            return [slot for slot in answered if slot not in known]
        waits_for = set(asked.nodes) - known if self._gathering else ()
        request = msgspec.msgpack.encode(asked.id)
        answers = stored(client, "answered", waits_for)
        return [other for other, value in answers.items() if value == request]
