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

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from commlens.watch.nodes.beat import LAST, QUESTION, Beat, Digests, decoded, key, pack_digests
from commlens.watch.nodes.bundles import BUNDLES_ABOVE, STALE_S, Bundles, bundled_by, store_bundle
from commlens.watch.nodes.calls import Calls, wake_key
from commlens.watch.nodes.gathering import Gathering
from commlens.watch.nodes.known_nodes import Disagreements
from commlens.watch.nodes.meeting_places import Client, Place, places
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
from commlens.watch.nodes.states import States
from commlens.watch.nodes.status_answers import StatusAnswers
from commlens.watch.open_waits import OpenWait, waits
from commlens.watch.roster import Member
from commlens.watch.snapshot import have_joined

log = logging.getLogger("commlens")

MOVE_ON_S: Final = 10.0  # after which the nodes meet elsewhere, if the store does not answer
_RETRY_MAX_S: Final = 2.0  # between two connections to a store that fails
_ASKED_S: Final = 10.0  # after a request, nodes that bundle values do so often
_BUSY_WAIT_S: Final = 2 * PERIOD_S  # a node with a rank that waits for longer rests less
LINGER_S: Final = 3 * BUSY_PERIOD_S  # before a process ends that has just published news


class Nodes(Gathering):
    """This node's part in the exchange. Public methods are called from the watcher's thread.

    ``NodesInSight`` holds this node's beat and those of the others, :class:`Gathering` the requests
    for evidence; this class exchanges them with the store, in a thread of its own.

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
        self._wake = wake
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._look_at = 0.0  # time.monotonic() of the next look for the store
        super().__init__(host, folder)

    def _reset(self) -> None:
        super()._reset()
        self._status_answers = StatusAnswers(self._look, self._look_at_states, self._poke.set)
        # which values to read, with many nodes; moments are time.monotonic()
        self._bundles = Bundles()
        self._bundled_at = 0.0  # the moment at which this node last bundled its neighbours' values
        self._read_all_at = 0.0  # the moment at which all values were read last
        self._read_count = 0  # how many nodes there were then
        self._calls = Calls()
        self._poke_at = 0.0  # the moment at which to exchange values although none is due

    # --- the watcher's side

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
        self._contact.places = where
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
        self._contact.has_joined = have_joined(members)
        now_ns = time.monotonic_ns()
        everywhere = waiting + (self.waits(now_ns) if self.reporter is None else [])
        oldest_ns = min(
            (wait.since_ns for wait in everywhere if wait.kind == "collective"), default=0
        )
        age_s = (now_ns - oldest_ns) / 1e9 if oldest_ns else 0.0
        if rests_long(self._known.count):  # so a beat may be many seconds old when it is read
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
            self._poke_at = now + random.uniform(0.0, busy_period_s(self._known.count))
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

    # --- the thread

    def _run(self) -> None:
        """Exchange values until :meth:`leave`. After an error connect again, and after
        ``MOVE_ON_S`` of errors in the next place.
        """
        slot = -1  # none drawn yet
        me = threading.current_thread()  # leave() may give up on it, and begin() start another one
        silent_since, retry_s = time.monotonic(), BUSY_PERIOD_S
        while self._thread is me and not self._closing.is_set():
            place = self._contact.places[0]
            try:
                with contextlib.closing(place.open(self._keep_waiting)) as client:
                    if slot < 0:
                        slot = client.add(key("nodes"), 1) % QUESTION - 1
                        self.update(slot=slot, serves_store=place.ends_with_this_node())
                    for _ in self._exchanges(client, slot):
                        silent_since, retry_s = time.monotonic(), BUSY_PERIOD_S
                return  # this node has left
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
            if not self._contact.has_joined:
                silent_since = time.monotonic()  # rank 0 may not serve the store yet
            if len(self._contact.places) > 1 and time.monotonic() - silent_since > MOVE_ON_S:
                slot, silent_since = -1, time.monotonic()
                self._move_on()
            # a random time, so that not all nodes connect at once
            self._closing.wait(PERIOD_S if slot < 0 else retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _RETRY_MAX_S)

    def _exchanges(self, client: Client, slot: int) -> Iterator[None]:
        """Exchange values through one connection, again and again, until :meth:`leave`. Yields
        after each exchange, before the rest.
        """
        while self._thread is threading.current_thread():
            is_last = self._closing.is_set()
            self._exchange(client, slot)
            yield
            if is_last:
                self._end(client)
                return
            self._rest(client, slot)

    def _keep_waiting(self, waited_s: float) -> bool:
        """Return whether to wait on for a store that does not answer: it is busy, and another
        connection would make it busier.
        """
        self._note_error(TimeoutError())
        if self._thread is not threading.current_thread() or self._closing.is_set():
            return False
        return (
            waited_s < MOVE_ON_S or len(self._contact.places) == 1 or not self._contact.has_joined
        )

    def _note_error(self, error: OSError) -> None:
        with self._changed:
            self._contact.note_error(error)
            self._changed.notify_all()  # evidence that is waited for may not come any more

    def _end(self, client: Client) -> None:
        """Let the other nodes read the news before this process ends, since the store may end with
        it; and leave no file behind.
        """
        if not self.others:
            client.remove()
        elif time.monotonic() - self._announced < PERIOD_S:
            time.sleep(LINGER_S)

    def _move_on(self) -> None:
        """Meet in the next place. The nodes draw new slots there. Nodes that do not come stay known
        as lost, under a slot below 0.
        """
        with self._changed:
            self._contact.given_up.append(self._contact.places.pop(0))
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
            self._poke.wait(random.uniform(0.0, busy_period_s(self._known.count) / 2))
        self._poke.clear()

    def _period_s(self) -> float:
        """Return how long to rest until the next exchange."""
        reporter, count = self.reporter, self._known.count
        with self._changed:
            has_ended = self._mine.dead or self._mine.ended
            if self._awaits_evidence or self._status_answers.is_collecting or has_ended:
                return BUSY_PERIOD_S
            longest_s = max([self._mine.wait_s, *(beat.wait_s for beat in self._known.beats)])
        rests_s = [rest_period_s(count)]
        if reporter is None or self._mine.slot in reporter.successors:
            rests_s.append(QUICK_S)  # this node reports, or would be next
        if bundled_by(self._mine.slot, count):
            rests_s.append(self._bundle_every_s())
        if longest_s > _BUSY_WAIT_S:
            rests_s.append(busy_period_s(count))
        return min(rests_s)

    def _bundle_every_s(self) -> float:
        """Return how often a node bundles values: often after a request, because its neighbours are
        most likely asked, too.
        """
        is_asked = time.monotonic() - self._asked_at < _ASKED_S
        return PERIOD_S if is_asked else rest_period_s(self._known.count)

    def _exchange(self, client: Client, slot: int) -> None:
        """Store this node's beat, and what it was asked for; read the others' beats, and what this
        node has asked for.
        """
        counter = client.add(key("nodes"), 0)
        self._known.count = count = counter % QUESTION
        self._status_answers.see(client, counter, slot, asked_period_s(count))
        self._status_answers.store(client, slot)
        mine = self._publish(client, slot)
        beats = [
            beat
            for value in self._values(client)
            if (beat := decoded(value, Beat)) is not None
            and (beat.slot in self._known or not beat.finished)
        ]
        now = time.monotonic()
        with self._changed:
            self._contact.note_answer(now)
            self._known.note(beats, now)
            self._note_requests(beats, now)
        self._read_evidence(client, beats)
        if self._asked or any(beat.news or beat.dead for beat in beats):
            self._wake()
        self._collect(client)
        reporter = self.reporter
        # the nodes that would be next hear from the reporter often, and soon take its place
        is_next = reporter is not None and mine.slot in reporter.successors
        self._known.lost_s = LOST_S if is_next else lost_after_s(count)
        if rest_period_s(count) > PERIOD_S:
            self._calls.call_reporter(client, mine, self.reporter)

    def _publish(self, client: Client, slot: int) -> Beat:
        """Store this node's beat, its evidence if the watcher has left some, and a bundle of its
        neighbours' beats if it is due. Return the beat.
        """
        count = self._known.count
        with self._changed:
            evidence, self._evidence = self._evidence, None
            self._mine = mine = msgspec.structs.replace(
                self._mine,
                count=self._mine.count + 1,
                successors=self._known.view(self._mine, time.monotonic()).successors,
                ended_at=(self._mine.ended_at or count) if self._mine.ended else 0,
            )
        if evidence is not None:
            client.set(key("evidence", slot), evidence)
            client.set(key("answered", slot), msgspec.msgpack.encode(mine.answered))
        own = msgspec.msgpack.encode(mine)
        client.set(key("node", slot), own)
        self._bundles.stale_s = STALE_S * rest_period_s(count)
        # as the reporter of so many nodes that they rest for longer than a period
        if rest_period_s(count) > PERIOD_S and self.reporter is None:
            self._calls.take(client)
            if rests_long(count):
                self._calls.wake_others(client, mine, lambda: self.others)
        else:
            self._calls.slots = set()
        now = time.monotonic()
        if now - self._bundled_at >= 0.9 * self._bundle_every_s():
            self._bundled_at = now
            if neighbours := bundled_by(slot, count):
                store_bundle(client, slot, own, neighbours, mine.count)
        return mine

    def _values(self, client: Client) -> list[bytes]:
        """Read the beats of other nodes, packed: if they are due, those of all nodes that matter to
        this one, else those of the nodes that have called.
        """
        now, count = time.monotonic(), self._known.count
        with self._changed:
            asked = self._mine.asked
            asks_all = self._gathering and (asked is None or not asked.nodes)
            was_read = count == self._read_count and not asks_all
            is_due = not was_read or now - self._read_all_at >= 0.9 * rest_period_s(count)
            # As of the store's last answer, not of now: if it took long to answer, the others have
            # not fallen silent.
            known, new = (
                self._known.to_read(self._mine, self._contact.answered_at) if is_due else ([], [])
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
