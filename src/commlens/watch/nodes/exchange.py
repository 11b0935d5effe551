"""The exchange between the watchers of a job's nodes, through the job's own store: one of them
reports for the whole job, with the evidence of all. See docs/nodes.md.

Each watcher (a *node*) draws a number from a counter in the store, its *slot*, and overwrites one
small value about once a second, its *beat*: its ranks, how long they have waited, which of them
died. The *reporter* is the live node with the lowest rank. To get evidence, it puts a request into
its beat, and each node answers with its ranks' black boxes under a key of its own::

    commlens/7/nodes       2                                  slots drawn so far
    commlens/7/node/0      Beat(0, "n01", ranks=[0, 1], asked=Request(number=1, ...), ...)
    commlens/7/node/1      Beat(1, "n02", ranks=[2, 3], wait_s=31.0, answered=(0, 1), ...)
    commlens/7/evidence/1  the packed black boxes of ranks 2 and 3

The other nodes print one line (*news*) for each verdict that the reporter prints. If the store
cannot be reached, each node gives its own verdict.

All traffic is in a thread of its own, since a store may take seconds to answer: the watcher reads
what the thread read last, and changes this node's beat, which the thread stores next.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from commlens.text import ranks_phrase
from commlens.watch.nodes.beat import (
    LAST,
    QUESTION,
    Beat,
    Digests,
    News,
    Request,
    decoded,
    key,
    pack_digests,
)
from commlens.watch.nodes.bundles import BUNDLES_ABOVE, STALE_S, Bundles, bundled_by, store_bundle
from commlens.watch.nodes.calls import Calls, Poke, wake_key
from commlens.watch.nodes.known_nodes import (
    Disagreements,
    KnownNodes,
    Lost,
    NodesView,
    OldestWaits,
)
from commlens.watch.nodes.meeting_places import Client, Place, places, stored
from commlens.watch.nodes.periods import (
    BUSY_PERIOD_S,
    LOST_S,
    PERIOD_S,
    QUICK_S,
    asked_period_s,
    busy_period_s,
    lost_after_s,
    rest_period_s,
    rests_long,
)
from commlens.watch.nodes.states import Collecting, States
from commlens.watch.nodes.states_tree import Tree
from commlens.watch.nodes.status_answers import StatusAnswers
from commlens.watch.roster import Member
from commlens.watch.snapshot import have_joined
from commlens.watch.stall import OpenWait, waits

log = logging.getLogger("commlens")

MOVE_ON_S: Final = 10.0  # after which the nodes meet elsewhere, if the store does not answer
GATHER_S: Final = 3.0  # to wait for evidence; more with many nodes
_RETRY_MAX_S: Final = 2.0  # between two connections to a store that fails
_ASKED_S: Final = 10.0  # after a request, nodes that bundle values do so often
_BUSY_WAIT_S: Final = 2 * PERIOD_S  # a node with a rank that waits for longer rests less
LINGER_S: Final = 3 * BUSY_PERIOD_S  # before a process ends that has just published news
_NEWS_KEPT: Final = 4  # lines in a beat

Answer = TypeVar("Answer")


class LostStore(NamedTuple):
    """The store in which the nodes met, and which they no longer reach."""

    place: Place
    silent_s: float
    refuses: bool  # connections are refused: the process that served it has ended
    beats: list[Beat]  # of the nodes that are out of sight without it


class Nodes:
    """This node's part in the exchange, and the other nodes as it sees them. Public methods are
    called from the watcher's thread.

    Args:
        host: this machine's name.
        wake: wakes the watcher; called from the thread when there is something to do.
        folder: the meeting place of nodes that reach no store, if it is shared.
        look: returns this node's evidence for ``commlens status`` on another node, given the
            number of newest records of each rank; called in a thread of its own.
        look_at_states: returns the states of this node's ranks; called like ``look``.
    """

    def __init__(
        self,
        host: str,
        wake: Callable[[], None],
        folder: Path | None = None,
        look: Callable[[int], bytes] = lambda _: b"",
        look_at_states: Callable[[], States] = States,
    ) -> None:
        self._look, self._look_at_states = look, look_at_states
        self._host = host
        self._folder = folder
        self._wake = wake
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._poke = Poke()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._places: list[Place] = []  # where the nodes may meet; the first is where they do
        self._look_at = 0.0  # time.monotonic() of the next look for the store
        self._reset()

    def _reset(self) -> None:
        folder = os.path.abspath(self._folder) if self._folder else ""  # noqa: PTH100
        # Moments are time.monotonic(); 0.0: not yet.
        self._mine = Beat(-1, self._host, [], dump_dir=folder)
        self._known = KnownNodes()
        self._oldest_waits = OldestWaits()
        self._disagreements = Disagreements()
        self._status_answers = StatusAnswers(self._look, self._look_at_states, self._poke.set)
        self._joined = False  # a rank of this node has passed init_process_group
        self._announced = 0.0  # the moment of the last line of news

        # the place where the nodes meet
        self._given_up: list[Place] = []  # places before it, which did not answer
        self._contact = 0.0  # the moment of its last answer
        self._refused = False  # it refuses connections
        # the moment of the first error since the last answer, or in a place that was given up
        self._lost_since = 0.0
        self._lost_refused = False  # that was a refused connection

        # which values to read, with many nodes
        self._count = 0  # of nodes that ever drew a slot
        self._bundles = Bundles()
        self._bundled_at = 0.0  # the moment at which this node last bundled its neighbours' values
        self._read_all_at = 0.0  # the moment at which all values were read last
        self._read_count = 0  # how many nodes there were then
        self._calls = Calls()
        self._poke_at = 0.0  # the moment at which to exchange values although none is due

        # evidence that this node is asked for
        self._asked: Request | None = None
        self._asked_at = 0.0
        self._evidence: bytes | None = None  # to be stored
        self._collecting: Collecting | None = None  # states, from the nodes below in the tree
        # evidence that this node has asked for
        self._gathering = False
        self._gathered: dict[int, bytes] = {}  # by slot
        self._from_root: Collecting | None = None  # states, from the root of the tree

    # --- the watcher's side: this node

    def meet(self, members: Sequence[Member], digests: Callable[[], Digests]) -> bool:
        """Describe this node's ranks to the other nodes; begin to meet these if that was not
        possible before. Returns False while no meeting place is known.

        Args:
            members: this node's ranks.
            digests: returns the digests of the channels that reach other nodes.
        """
        if self._thread is None:
            if time.monotonic() < self._look_at:
                return False
            self._look_at = time.monotonic() + PERIOD_S
            if not self.begin(places(members, self._folder)):
                return False
        if self.others:
            self.update(digests=pack_digests(digests()))
        self.update_waits(members, waits(members), [member.rank for member in members])
        self.update(world_size=max(member.world_size for member in members))
        return True

    def begin(self, where: list[Place]) -> bool:
        """Begin to meet the others at the first of these places, or at a later one if that does not
        answer. Returns False if there is no place.
        """
        self._places = where
        if where:
            self._thread = threading.Thread(target=self._run, name="commlens-nodes", daemon=True)
            self._thread.start()
        return bool(where)

    def update_waits(
        self, members: Sequence[Member], waiting: list[OpenWait], ranks: list[int]
    ) -> None:
        """Put into this node's beat how long ranks have waited, and whether all have ended. The
        reporter puts the oldest wait of all nodes there.

        Args:
            members: this node's ranks.
            waiting: what they wait in.
            ranks: by which the others know this node; the node with the lowest one reports.
        """
        self._joined = have_joined(members)
        now_ns = time.monotonic_ns()
        everywhere = waiting + (self.waits(now_ns) if self.reporter is None else [])
        oldest_ns = min(
            (wait.since_ns for wait in everywhere if wait.kind == "collective"), default=0
        )
        age_s = (now_ns - oldest_ns) / 1e9 if oldest_ns else 0.0
        if rests_long(self._count):  # so a beat may be many seconds old when it is read
            if age_s < _BUSY_WAIT_S:
                oldest_ns, age_s = 0, 0.0  # it will most likely have ended by then
            self._poke_once_busy(oldest_ns)
        self.update(
            ranks=ranks,
            wait_id=oldest_ns,
            wait_s=round(age_s, 1),
            ended=not any(member.alive for member in members),
        )

    def _poke_once_busy(self, oldest_ns: int) -> None:
        """Let the thread exchange values soon if a wait has become long while it rests. A random
        delay keeps all nodes from coming at once.
        """
        now = time.monotonic()
        if oldest_ns and not self._mine.wait_id and not self._poke_at:
            self._poke_at = now + random.uniform(0.0, busy_period_s(self._count))
        if self._poke_at and now >= self._poke_at:
            self._poke_at = 0.0
            self._poke.set()

    def leave(self, evidence: Callable[[], bytes] | None = None) -> None:
        """Leave: the others no longer wait for this node, but have its last evidence. Returns
        within a second or so.
        """
        if self._thread is None:
            return
        if evidence is not None and self.others:
            self.answer(LAST, evidence())
        self.update(finished=True)
        self._closing.set()
        self._poke.set()
        self._thread.join(2 * PERIOD_S)
        self._thread = None
        self._closing.clear()
        self._reset()

    def update(self, **fields: object) -> None:
        """Change fields of this node's beat. The others hear of deaths and ends at once."""
        with self._lock:
            changed = {name for name, value in fields.items() if getattr(self._mine, name) != value}
            if changed:
                self._mine = msgspec.structs.replace(self._mine, **fields)
        if changed & {"dead", "finished", "ended"}:
            self._poke.set()

    # --- the other nodes

    @property
    def port(self) -> int:
        """The port of the store in which the nodes meet; 0: none."""
        return getattr(self._places[0], "port", 0) if self._places else 0

    @property
    def others(self) -> list[Beat]:
        """The other nodes that live, by slot; empty without a store."""
        view = self._view()
        return list(view.live) if view is not None else []

    def _view(self) -> NodesView | None:
        """Return the conclusions from the beats of the other nodes; None without a store."""
        with self._lock:
            if self._has_no_store(self._known.lost_s):
                return None
            return self._known.view(self._mine, time.monotonic())

    def _has_no_store(self, after_s: float) -> bool:
        """Return whether the store refuses connections, or has been silent for this long."""
        return self._refused or time.monotonic() - self._contact > after_s

    @property
    def ranks(self) -> set[int]:
        """The ranks of the other nodes that live or have left their evidence."""
        with self._lock:
            left = self._known.ranks_that_left_evidence(self._mine)
        return left | {rank for beat in self.others for rank in beat.ranks}

    def host(self, slot: int) -> str:
        """Return a name for another node: its host, with the slot if several nodes share one host
        (a container each).
        """
        with self._lock:
            return self._known.host(slot, self._host)

    def lost(self, after_s: float) -> list[Lost]:
        """Return the nodes that have been silent for this long without having left; all nodes, if
        the store is silent. With many nodes, each is heard less often, so the time is longer.
        """
        rest_s = rest_period_s(self._count)
        seldom_s = rest_s if rest_s > PERIOD_S else 0.0
        with self._lock:
            if seldom_s:
                after_s = max(after_s, self._known.lost_s)
            return self._known.lost(
                self._mine,
                time.monotonic(),
                after_s=0.0 if self._refused else after_s,
                without_store=self._has_no_store(after_s),
                read_every_s=seldom_s,
            )

    def sentences_on_lost(self) -> list[str]:
        """Return sentences about the other nodes that are out of sight: nodes that fell silent
        without leaving, or all, if the store fell silent.
        """
        lost = self.lost(LOST_S)
        if not lost or not (self._given_up or self._has_no_store(self._known.lost_s)):
            return [
                f"Node {each.beat.host} ({ranks_phrase(each.beat.ranks)}) no longer answers."
                for each in lost
            ]
        how = (
            "has ended"
            if self._refused or self._lost_refused
            else f"has not answered for {min(each.silent_s for each in lost):.0f} s"
        )
        if self._given_up:
            how += f", and they have not come to {self._places[0]}"
        ranks = ranks_phrase(rank for each in lost for rank in each.beat.ranks)
        place = (self._given_up or self._places)[0]
        return [f"Of {ranks} on other nodes nothing is known: {place} {how}."]

    @property
    def lost_store(self) -> LostStore | None:
        """The store that was lost; None if no store was lost, if the nodes meet elsewhere, or if
        all nodes had ended.
        """
        if not self._lost_since or self.others:
            return None
        with self._lock:
            living = (known.beat for known in self._known.peers(self._mine) if known.lives)
            beats = [beat for beat in living if not (beat.finished or beat.ended)]
            place = (self._given_up or self._places)[0]
            silent_s = time.monotonic() - self._lost_since
            return LostStore(place, silent_s, self._lost_refused, beats) if beats else None

    @property
    def dead_elsewhere(self) -> list[int]:
        """The ranks of other nodes that died."""
        with self._lock:
            return self._known.view(self._mine, time.monotonic()).dead

    @property
    def reporter(self) -> Beat | None:
        """The node that reports; None if it is this one."""
        view = self._view()
        return view.reporter(self._mine) if view is not None else None

    def waits(self, now_ns: int) -> list[OpenWait]:
        """Return the oldest waits of other nodes, one of each node. If another node reports for the
        job, its beat holds the oldest of all.
        """
        view, reporter = self._view(), self.reporter
        beats = [] if view is None else view.waiting if reporter is None else [reporter]
        return self._oldest_waits.of(beats, view, now_ns)

    @property
    def dump(self) -> str:
        """The folder of the reporter's last dump; empty if there is none yet."""
        reporter = self.reporter
        return reporter.dump if reporter is not None else ""

    # --- lines of one node that others print

    def announce(
        self, text: str, *, kind: str = "", abort: bool = False, to: Sequence[int] = ()
    ) -> None:
        """Let the other nodes print a line, or those with the slots ``to``."""
        with self._lock:
            news = self._mine.news
            self._announced = time.monotonic()
            number = (news[-1].number if news else 0) + 1
            self._mine = msgspec.structs.replace(
                self._mine, news=[*news, News(number, text, kind, abort, [*to])][-_NEWS_KEPT:]
            )
        self._poke.set()

    def take_news(self) -> list[tuple[str, News]]:
        """Return the lines of other nodes that were not taken before, each with its node's host."""
        with self._lock:
            return self._known.take_news(self._mine, time.monotonic())

    def take_disagreement(self, now: float) -> bool:
        """Return whether ranks of other nodes, or whole nodes, seem to issue different collectives,
        so that all records should be compared. The same signs return True only now and then.
        """
        view = self._view()
        return view is not None and self._disagreements.take(view, self._mine.digests, now)

    # --- evidence

    def take_request(self) -> Request | None:
        """Return the request for evidence that this node must answer, only once."""
        with self._lock:
            request, self._asked = self._asked, None
        return request

    def answer(self, request: Request, evidence: bytes | States) -> None:
        """Store this node's evidence, or the states of its ranks with those of the nodes below in
        the tree.
        """
        with self._lock:
            if isinstance(evidence, bytes):
                self._evidence = evidence
            elif self._collecting is not None and self._collecting.request.id == request.id:
                self._collecting.add_own(evidence)
            self._mine = msgspec.structs.replace(self._mine, answered=request.id)
        self._poke.set()

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
        with self._lock:
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
            timeout_s = GATHER_S + busy_period_s(self._count) - BUSY_PERIOD_S
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
                if left <= 0 or self._refused or all(map(self._has_answered, asked)):
                    self._gathering = False
                    return {**self._known.evidence_left(self._mine), **self._gathered}, True
                if len(self._gathered) > more_than:
                    return dict(self._gathered), False
                self._changed.wait(left)

    def _has_answered(self, beat: Beat) -> bool:
        """Return whether a node that was asked has answered, or has left with its last evidence."""
        return beat.slot in self._gathered or beat.slot in self._known.last_evidence

    def gather_states(self, own: States) -> States | None:
        """Ask the other nodes for the states of their ranks, which is less than their evidence: in
        a large job it shows first where to look. The nodes form a tree, in which each adds up the
        states of those below, so that no node reads those of all.

        Returns:
            The states that came in time, with this node's own. None if the nodes cannot form a
            tree, because too many slots belong to nodes that have gone.
        """
        slots = {self._mine.slot, *(beat.slot for beat in self.others)}
        tree = Tree.of(slots, self._count)
        if tree is None:
            return None
        with self._changed:
            now, period_s = time.monotonic(), busy_period_s(self._count)
            request = self._ask(tree=tree)
            # this node takes part as any other, and also waits for the sum of the root
            self._collecting = Collecting(request, request.slot, began=now, period_s=period_s)
            self._collecting.add_own(own)
            self._from_root = root = Collecting(request, None, began=now, period_s=period_s)
            while not root.is_complete(time.monotonic()) and not self._refused:
                self._changed.wait(BUSY_PERIOD_S)
            self._from_root = None
        joined = root.copy()
        joined.add(own)
        return joined

    def _collect(self, client: Client) -> None:
        """Read the states that the nodes below have stored, and store the sum once all have."""
        for collecting in (self._collecting, self._from_root):
            if collecting is not None and not collecting.is_done:
                collecting.collect(client)
                with self._changed:
                    self._changed.notify_all()

    # --- the thread

    def _run(self) -> None:
        """Exchange values until :meth:`leave`. After an error connect again, and after
        ``MOVE_ON_S`` of errors in the next place.
        """
        slot = -1  # none drawn yet
        me = threading.current_thread()  # leave() may give up on it, and begin() start another one
        silent_since = time.monotonic()
        retry_s = BUSY_PERIOD_S
        while self._thread is me and not self._closing.is_set():
            place = self._places[0]
            client: Client | None = None
            try:
                client = place.open(self._keep_waiting)
                if slot < 0:
                    slot = client.add(key("nodes"), 1) % QUESTION - 1
                    self.update(slot=slot, serves_store=place.ends_with_this_node())
                while self._thread is me:
                    last = self._closing.is_set()
                    self._exchange(client, slot)
                    silent_since, retry_s = time.monotonic(), BUSY_PERIOD_S
                    if last:
                        self._end(client)
                        return
                    self._rest(client, slot)
            except OSError as error:
                log.debug("commlens: %s: %s", place, error)
                self._note_error(error)
            except Exception as error:  # never harm the job
                log.warning(
                    "commlens: the watcher no longer meets the other nodes: %s: %s",
                    type(error).__name__,
                    error,
                )
                return
            finally:
                if client is not None:
                    client.close()
            if not self._joined:
                silent_since = time.monotonic()  # rank 0 may not serve the store yet
            if len(self._places) > 1 and time.monotonic() - silent_since > MOVE_ON_S:
                slot, silent_since = -1, time.monotonic()
                self._move_on()
            # a random time, so that not all nodes connect at once
            self._closing.wait(PERIOD_S if slot < 0 else retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _RETRY_MAX_S)

    def _keep_waiting(self, waited_s: float) -> bool:
        """Return whether to wait on for a store that does not answer: it is busy, and another
        connection would make it busier.
        """
        self._note_error(TimeoutError())
        if self._thread is not threading.current_thread() or self._closing.is_set():
            return False
        return waited_s < MOVE_ON_S or len(self._places) == 1 or not self._joined

    def _note_error(self, error: OSError) -> None:
        """Note that the store does not answer, if it ever did. Before that, and before a rank here
        has passed ``init_process_group``, rank 0 may not have made it yet.
        """
        with self._changed:
            if self._contact and self._joined:
                self._lost_since = self._lost_since or time.monotonic()
                if isinstance(error, ConnectionRefusedError):  # its process has ended: it did serve
                    self._refused = self._lost_refused = True
                    self._changed.notify_all()

    def _end(self, client: Client) -> None:
        """Let the other nodes read the news before this process ends, since the store may end with
        it; and leave no file behind.
        """
        time.sleep(
            LINGER_S if time.monotonic() - self._announced < PERIOD_S and self.others else 0.0
        )
        if not self.others:
            client.remove()

    def _move_on(self) -> None:
        """Meet in the next place. The nodes draw new slots there. Nodes that do not come stay known
        as lost, under a slot below 0.
        """
        with self._lock:
            self._given_up.append(self._places.pop(0))
            self._known.renumber()
            self._gathered, self._disagreements = {}, Disagreements()
            self._asked = self._collecting = None
            self._bundles = Bundles()
            self._mine = msgspec.structs.replace(
                self._mine, slot=-1, ended_at=0, asked=None, answered=(-1, 0)
            )

    def _rest(self, client: Client, slot: int) -> None:
        """Wait until the next exchange is due, or this process or another node wakes this one.
        After another node's call, wait a random moment longer, so that not all nodes come at once.
        """
        period_s = self._period_s()
        if period_s <= QUICK_S:
            self._poke.wait(period_s)
        elif client.wait_for(wake_key(slot), period_s, self._poke.fileno()):
            self._poke.wait(random.uniform(0.0, busy_period_s(self._count) / 2))
        self._poke.clear()

    def _would_report_next(self) -> bool | None:
        """Return whether this node reports next if the reporter falls silent; None if it reports
        now.
        """
        reporter = self.reporter
        return None if reporter is None else self._mine.slot in reporter.successors

    def _period_s(self) -> float:
        """Return how long to rest until the next exchange."""
        is_next = self._would_report_next()
        with self._lock:
            collects = self._collecting is not None and not self._collecting.is_done
            asks = self._gathering or self._from_root is not None
            has_ended = self._mine.dead or self._mine.ended
            if asks or collects or self._status_answers.is_collecting or has_ended:
                return BUSY_PERIOD_S
            longest_s = max([self._mine.wait_s, *(beat.wait_s for beat in self._known.beats)])
        rest_s = rest_period_s(self._count)
        if is_next is not False:  # this node reports, or would be next
            rest_s = min(rest_s, QUICK_S)
        if bundled_by(self._mine.slot, self._count):
            rest_s = min(rest_s, self._bundle_every_s())
        return min(rest_s, busy_period_s(self._count)) if longest_s > _BUSY_WAIT_S else rest_s

    def _bundle_every_s(self) -> float:
        """Return how often a node bundles values: often after a request, because its neighbours are
        most likely asked, too.
        """
        is_asked = time.monotonic() - self._asked_at < _ASKED_S
        return PERIOD_S if is_asked else rest_period_s(self._count)

    def _exchange(self, client: Client, slot: int) -> None:
        """Store this node's beat, and what it was asked for; read the others' beats, and what this
        node has asked for.
        """
        counter = client.add(key("nodes"), 0)
        self._count = counter % QUESTION
        self._status_answers.see(client, counter, slot, asked_period_s(self._count))
        self._status_answers.store(client, slot)
        mine = self._publish(client, slot)
        beats = [
            beat
            for beat in map(decoded, self._values(client, self._count))
            if beat is not None and (beat.slot in self._known or not beat.finished)
        ]
        now = time.monotonic()
        with self._changed:
            self._contact, self._refused = now, False
            if not self._given_up:
                self._lost_since, self._lost_refused = 0.0, False
            self._known.note(beats, now)
            for beat in beats:
                if beat.asked is not None and mine.shares_incarnation(beat):
                    self._note_request(beat.asked, beat, mine, now)
        self._read_evidence(client, beats)
        if self._asked or any(beat.news or beat.dead for beat in beats):
            self._wake()
        self._collect(client)
        # the nodes that would be next hear from the reporter often, and soon take its place
        self._known.lost_s = LOST_S if self._would_report_next() else lost_after_s(self._count)
        if rest_period_s(self._count) > PERIOD_S:
            self._calls.call_reporter(client, mine, self.reporter)

    def _publish(self, client: Client, slot: int) -> Beat:
        """Store this node's beat, its evidence if the watcher has left some, and a bundle of its
        neighbours' beats if it is due. Return the beat.
        """
        with self._lock:
            evidence, self._evidence = self._evidence, None
            self._mine = mine = msgspec.structs.replace(
                self._mine,
                count=self._mine.count + 1,
                successors=self._known.view(self._mine, time.monotonic()).successors,
                ended_at=(self._mine.ended_at or self._count) if self._mine.ended else 0,
            )
        if evidence is not None:
            client.set(key("evidence", slot), evidence)
            client.set(key("answered", slot), msgspec.msgpack.encode(mine.answered))
        own = msgspec.msgpack.encode(mine)
        client.set(key("node", slot), own)
        self._bundles.stale_s = STALE_S * rest_period_s(self._count)
        # as the reporter of so many nodes that they rest for longer than a period
        if rest_period_s(self._count) > PERIOD_S and self._would_report_next() is None:
            self._calls.take(client)
            if rests_long(self._count):
                self._calls.wake_others(client, mine, lambda: self.others)
        else:
            self._calls.slots = set()
        now = time.monotonic()
        if now - self._bundled_at >= 0.9 * self._bundle_every_s():
            self._bundled_at = now
            if neighbours := bundled_by(slot, self._count):
                store_bundle(client, slot, own, neighbours, mine.count)
        return mine

    def _note_request(self, request: Request, beat: Beat, mine: Beat, now: float) -> None:
        """Note a request of the reporter for the watcher to take. It stays in the reporter's beat
        until the next request, so it is seen again and again.
        """
        may_ask = beat.order < mine.order  # for a moment, two nodes may both mean to report
        if not (may_ask and request.concerns(mine.slot)) or mine.answered == request.id:
            return
        is_known = self._collecting is not None and self._collecting.request.id == request.id
        if request.tree is not None and not is_known:
            period_s = busy_period_s(self._count)
            self._collecting = Collecting(request, mine.slot, began=now, period_s=period_s)
        self._asked, self._asked_at = request, now

    def _read_evidence(self, client: Client, beats: Sequence[Beat]) -> None:
        """Read the answers to the last request, and the evidence of nodes that have left."""
        with self._lock:
            # gather() may have asked again since this node's value was stored
            asked = self._mine.asked
            left = [
                beat.slot
                for beat in beats
                if beat.answered == LAST.id and beat.slot not in self._known.last_evidence
            ]
        wanted = self._answered(client, asked, beats) if asked is not None else []
        if not wanted and not left:
            return
        values = client.get([key("evidence", other) for other in [*wanted, *left]])
        with self._changed:
            if asked is self._mine.asked:
                self._gathered.update(zip(wanted, values, strict=False))
            self._known.last_evidence.update(zip(left, values[len(wanted) :], strict=True))
            self._changed.notify_all()

    def _answered(self, client: Client, asked: Request, beats: Sequence[Beat]) -> list[int]:
        """Return the nodes that have stored their evidence since. If few were asked, read the id of
        the request that each has answered, which costs less than to read all beats.
        """
        with self._lock:
            known = set(self._gathered)
        if asked.tree is not None:
            return []
        if not asked.nodes:
            answered = [beat.slot for beat in beats if beat.answered == asked.id]
            return [slot for slot in answered if slot not in known]
        waits_for = set(asked.nodes) - known if self._gathering else ()
        request = msgspec.msgpack.encode(asked.id)
        answers = stored(client, "answered", waits_for)
        return [other for other, value in answers.items() if value == request]

    def _values(self, client: Client, count: int) -> list[bytes]:
        """Read the beats of other nodes, packed: if they are due, those of all nodes that matter to
        this one, else those of the nodes that have called.
        """
        now = time.monotonic()
        with self._lock:
            asked = self._mine.asked
            asks_all = self._gathering and (asked is None or not asked.nodes)
            was_read = count == self._read_count and not asks_all
            is_due = not was_read or now - self._read_all_at >= 0.9 * rest_period_s(count)
            # As of the store's last answer, not of now: if it took long to answer, the others have
            # not fallen silent.
            known, new = (
                self._known.to_read(self._mine, count, self._contact) if is_due else ([], [])
            )
        if not is_due:
            called = sorted(self._calls.slots - {self._mine.slot})
            return self._bundles.read(client, called, now, self._calls.slots)
        if len(known) + len(new) > BUNDLES_ABOVE:
            self._read_all_at, self._read_count = now, count
            return self._bundles.read(client, [*known, *new], now, self._calls.slots)
        self._read_count = 0
        # A node may have drawn its slot and not yet stored its beat.
        there = client.existing_keys([key("node", other) for other in new])
        return client.get([*(key("node", other) for other in known), *there])
