"""The watchers of a job's nodes, which meet in the job's own store: one of them reports, with the evidence of all.

Each node has one small value in the store, which it overwrites about once a second: its ranks, how long they have waited, which of
them died. The reporter is the live node with the lowest rank. It asks for evidence by a number in its value; each node answers with
its ranks' black boxes. What the reporter prints, the other nodes print as one line. See docs/nodes.md.

All traffic is in a thread of its own. If the store cannot be reached, each node speaks for itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from commlens.text import ranks_phrase
from commlens.watch.channel_progress import Blocks, differ
from commlens.watch.roster import Member
from commlens.watch.stall import Wait, waits
from commlens.watch.store_client import StoreClient
from commlens.watch.strangers import meeting_of

log = logging.getLogger("commlens")

PERIOD_S: Final = 1.0
BUSY_PERIOD_S: Final = 0.2  # while evidence is gathered, or a rank has died
LOST_S: Final = 5.0  # a node or a store that has been silent for this long is taken as lost
EXAMINE_REST_S: Final = 1.0  # between comparisons of all nodes' records; doubled each time, because legal differences stay
_EXAMINE_REST_MAX_S: Final = 64.0
GATHER_S: Final = 3.0
READ_ALL_NODES: Final = 32  # with more, a node that does not report reads only the values of the reporter and its successor
_LEADERS_LOST_S: Final = 4 * LOST_S  # the reporter and those that would be next are all silent
_BUSY_NODES: Final = 512  # with more, BUSY_PERIOD_S grows with their number, which bounds the load of the store
_SUCCESSORS: Final = 8
LINGER_S: Final = 3 * BUSY_PERIOD_S
_NEWS_KEPT: Final = 4
LAST: Final = (-1, 1)
"""The request that the evidence of a node that leaves answers."""
_PREFIX: Final = "commlens/1"  # the number changes with the values' meaning


class News(msgspec.Struct, frozen=True):
    """A line of the reporter for the other nodes."""

    number: int
    text: str
    kind: str = ""  # of the verdict that it is the first line of
    abort: bool = False  # every node ends its ranks


class Beat(msgspec.Struct, frozen=True):
    """A node's value in the store."""

    slot: int
    host: str
    ranks: list[int]
    count: int = 0  # of beats: a node that lives changes it
    wait_id: int = 0  # identifies its oldest wait; 0: none
    wait_s: float = 0.0  # the oldest wait's age; the reporter's value holds that of the whole job
    dead: list[int] = []
    disagreements: int = 0  # that its ranks have among themselves, so far
    digests: dict[str, list[Blocks]] = {}  # of the channels that reach other nodes
    finished: bool = False  # it has left in order
    asks: int = 0  # the number of its last request for evidence
    answered: tuple[int, int] = (-1, 0)  # slot and number of the request that its evidence answers
    news: list[News] = []
    successors: list[int] = []  # of the reporter: the slots of the nodes that would report next

    @property
    def order(self) -> tuple[int, int]:
        """The node with the lowest order reports."""
        return (min(self.ranks, default=1 << 62), self.slot)


class Address(NamedTuple):
    """Of the job's store."""

    host: str
    port: int


class _Seen(NamedTuple):
    beat: Beat
    changed: float  # time.monotonic()
    lives: bool  # it has changed: else it may be of workers that torchelastic replaced without counting a restart on this node


class Nodes:
    """The other nodes of a job. Its properties may be read and its methods called from the watcher's thread.

    Args:
        host: this machine's name.
        wake: wakes the watcher; called from the thread when there is something to do.
    """

    def __init__(self, host: str, wake: Callable[[], None]) -> None:
        self._host = host
        self._wake = wake
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._poke = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._restart = 0
        self._address = Address("", 0)
        self._look_at = 0.0  # time.monotonic() of the next look for the store
        self._reset()

    def _reset(self) -> None:
        self._mine = Beat(-1, self._host, [])
        self._seen: dict[int, _Seen] = {}
        self._count = 0  # of nodes that ever drew a number
        self._announced = 0.0  # time.monotonic() of the last line
        self._contact = 0.0  # time.monotonic() of the last answer of the store
        self._asked: tuple[int, int] | None = None
        self._read_news: dict[int, int] = {}  # slot: highest number
        self._evidence: bytes | None = None  # to be stored
        self._disagreements: dict[int, int] = {}  # by slot: how many were examined
        self._examine_at, self._examine_rest_s = 0.0, EXAMINE_REST_S
        self._gathering = False
        self._gathered: dict[int, bytes] = {}
        self._left: dict[int, bytes] = {}  # the last evidence of nodes that have left
        self._waits: dict[tuple[int, int], int] = {}  # (slot, wait_id): CLOCK_MONOTONIC ns of its beginning, on this machine's clock

    # --- the watcher's side

    def meet(self, members: Sequence[Member], restart: int, digests: Callable[[], dict[str, list[Blocks]]]) -> bool:
        """Tell the other nodes about this one. Returns False if there are none, or none are known yet.

        Args:
            members: this node's ranks.
            restart: torchelastic's restart count.
            digests: returns the digests of the channels that reach other nodes.
        """
        if self._thread is None:
            if time.monotonic() < self._look_at:
                return False
            self._look_at = time.monotonic() + PERIOD_S
            address = store_address(members)
            if address is None:
                return False
            self._restart, self._address = max(restart, 0), address
            self._thread = threading.Thread(target=self._run, args=(address,), name="commlens-nodes", daemon=True)
            self._thread.start()
        now_ns = time.monotonic_ns()
        everywhere = waits(members) + (self.waits(now_ns) if self.reporter is None else [])
        oldest_ns = min((wait.since_ns for wait in everywhere if wait.kind == "collective"), default=0)
        age_s = (now_ns - oldest_ns) / 1e9 if oldest_ns else 0.0
        if self.others:
            self.update(digests=digests())
        self.update(ranks=[member.rank for member in members], wait_id=oldest_ns, wait_s=round(age_s, 1))
        return True

    def leave(self, evidence: Callable[[], bytes] | None = None) -> None:
        """Leave: the others no longer wait for this node, but have its last evidence. Returns within a second or so."""
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
        """Change this node's value."""
        with self._lock:
            changed = {name: value for name, value in fields.items() if getattr(self._mine, name) != value}
            if not changed:
                return
            self._mine = msgspec.structs.replace(self._mine, **changed)
        if changed.keys() & {"dead", "finished"}:
            self._poke.set()

    @property
    def others(self) -> list[Beat]:
        """The other nodes that live, by slot; empty without a store."""
        now = time.monotonic()
        with self._lock:
            if now - self._contact > LOST_S:
                return []
            return [seen.beat for seen in self._seen.values() if now - seen.changed <= LOST_S and not seen.beat.finished]

    @property
    def ranks(self) -> set[int]:
        """The ranks of the other nodes that live or have left their evidence."""
        with self._lock:
            left = [self._seen[slot].beat for slot in self._left]
        return {rank for beat in [*self.others, *left] for rank in beat.ranks}

    def host(self, slot: int) -> str:
        """Return a name for another node: its host, with the slot if several nodes share one host (a container each)."""
        with self._lock:
            hosts = [self._host, *(seen.beat.host for seen in self._seen.values())]
            own = self._seen[slot].beat.host if slot in self._seen else "node"
        return own if hosts.count(own) == 1 else f"{own}-{slot}"

    @property
    def unknown(self) -> list[str]:
        """What is not known of other nodes, in sentences: nodes that fell silent without leaving, or a store that does."""
        now = time.monotonic()
        with self._lock:
            beats = [seen.beat for seen in self._seen.values() if not seen.beat.finished]
            if beats and now - self._contact > LOST_S:
                what = f"the job's store at {self._address.host}:{self._address.port} has not answered for {now - self._contact:.0f} s"
                return [f"Of {ranks_phrase(rank for beat in beats for rank in beat.ranks)} on other nodes nothing is known: {what}."]
            silent = [seen.beat for seen in self._seen.values() if now - seen.changed > LOST_S and seen.lives and not seen.beat.finished]
        return [f"Node {beat.host} ({ranks_phrase(beat.ranks)}) no longer answers." for beat in silent]

    @property
    def dead_elsewhere(self) -> list[int]:
        """The ranks of other nodes that died."""
        with self._lock:
            return sorted(rank for seen in self._seen.values() if seen.lives for rank in seen.beat.dead)

    @property
    def reporter(self) -> Beat | None:
        """The node that reports; None if it is this one."""
        first = min(self.others, key=lambda beat: beat.order, default=None)
        return first if first is not None and first.order < self._mine.order else None

    def waits(self, now_ns: int) -> list[Wait]:
        """Return each other node's oldest wait; if another node reports for the job, its value holds the oldest of all."""
        reporter = self.reporter
        found: list[Wait] = []
        for beat in self.others if reporter is None else [reporter]:
            if beat.wait_id:
                # Ages are old by up to a period: keep the first estimate, so that a wait does not seem to begin anew.
                since_ns = self._waits.setdefault((beat.slot, beat.wait_id), now_ns - int(beat.wait_s * 1e9))
                found.append(Wait(since_ns, -1 - beat.slot, "collective"))
        self._waits = {key: since_ns for key, since_ns in self._waits.items() if any(since_ns == wait.since_ns for wait in found)}
        return found

    def announce(self, text: str, *, kind: str = "", abort: bool = False) -> None:
        """Let the other nodes print a line."""
        with self._lock:
            news = self._mine.news
            self._announced = time.monotonic()
            number = (news[-1].number if news else 0) + 1
            self._mine = msgspec.structs.replace(self._mine, news=[*news, News(number, text, kind, abort)][-_NEWS_KEPT:])
        self._poke.set()

    def take_news(self) -> list[tuple[str, News]]:
        """Return the lines of other nodes that were not taken before, each with its node's host."""
        new: list[tuple[str, News]] = []
        with self._lock:
            for slot, seen in [(slot, seen) for slot, seen in self._seen.items() if seen.lives]:
                new += [(seen.beat.host, news) for news in seen.beat.news if news.number > self._read_news.get(slot, 0)]
                if seen.beat.news:
                    self._read_news[slot] = seen.beat.news[-1].number
        return new

    def take_disagreement(self, now: float) -> bool:
        """Return whether nodes seem to disagree, so that all records should be compared; not too often."""
        others = self.others
        told = {beat.slot: beat.disagreements for beat in others}
        if any(count > self._disagreements.get(slot, 0) for slot, count in told.items()):
            self._disagreements.update(told)
            return True
        if now < self._examine_at:
            return False
        seen: dict[str, list[Blocks]] = dict(self._mine.digests)
        for beat in others:
            for channel, blocks in beat.digests.items():
                if channel in seen and differ(seen[channel], blocks):
                    self._examine_at = now + self._examine_rest_s
                    self._examine_rest_s = min(2 * self._examine_rest_s, _EXAMINE_REST_MAX_S)
                    return True
                seen.setdefault(channel, blocks)
        return False

    def take_request(self) -> tuple[int, int] | None:
        """Return the request for evidence that is to be answered; once."""
        with self._lock:
            request, self._asked = self._asked, None
        return request

    def answer(self, request: tuple[int, int], evidence: bytes) -> None:
        """Store this node's evidence."""
        with self._lock:
            self._evidence = evidence
            self._mine = msgspec.structs.replace(self._mine, answered=request)
        self._poke.set()

    def gather(self, *, timeout_s: float = GATHER_S) -> tuple[dict[int, bytes], list[Beat]]:
        """Ask the other nodes for their evidence.

        Returns:
            The evidence by slot, and the nodes that did not answer in time.
        """
        asked = self.others
        if not asked:
            return dict(self._left), []
        end = time.monotonic() + timeout_s
        with self._changed:
            self._gathering, self._gathered = True, {}
            self._mine = msgspec.structs.replace(self._mine, asks=self._mine.asks + 1)
            self._poke.set()
            while any(beat.slot not in {*self._gathered, *self._left} for beat in asked) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self._gathering = False
            gathered = {**self._left, **self._gathered}
        return gathered, [beat for beat in asked if beat.slot not in gathered]

    # --- the thread

    def _run(self, address: Address) -> None:
        slot = -1
        known = False
        me = threading.current_thread()
        while self._thread is me and not self._closing.is_set():  # leave() may have given up waiting for this thread
            client: StoreClient | None = None
            try:
                client = StoreClient(*address, timeout_s=PERIOD_S)
                if slot < 0:
                    slot = client.add(self._key("nodes"), 1) - 1
                    self.update(slot=slot)
                while self._thread is me:
                    last = self._closing.is_set()
                    self._exchange(client, slot)
                    known = True
                    if last:
                        # The store may end with this process: let the others read the news.
                        time.sleep(LINGER_S if time.monotonic() - self._announced < PERIOD_S and self.others else 0.0)
                        return
                    self._poke.wait(self._period_s())
                    self._poke.clear()
            except OSError as error:
                log.debug("commlens: the job's store at %s:%d: %s", *address, error)
            except Exception as error:  # never harm the job
                log.warning("commlens: the watcher no longer meets the other nodes: %s: %s", type(error).__name__, error)
                return
            finally:
                if client is not None:
                    client.close()
            self._closing.wait(PERIOD_S if not known else BUSY_PERIOD_S)

    def _key(self, *parts: object) -> str:
        return _key(self._restart, *parts)

    def _period_s(self) -> float:
        with self._lock:
            waited = max((seen.beat.wait_s for seen in self._seen.values()), default=0.0)
            if self._gathering or self._mine.dead:
                return BUSY_PERIOD_S
            busy = max(waited, self._mine.wait_s) > 2 * PERIOD_S
        return min(PERIOD_S, BUSY_PERIOD_S * max(1.0, self._count / _BUSY_NODES)) if busy else PERIOD_S

    def _exchange(self, client: StoreClient, slot: int) -> None:
        """Publish this node's value and read the others'."""
        with self._lock:
            evidence, self._evidence = self._evidence, None
            following = sorted((seen.beat.order, other) for other, seen in self._seen.items() if not seen.beat.finished)[:_SUCCESSORS]
            self._mine = mine = msgspec.structs.replace(
                self._mine, count=self._mine.count + 1, successors=[other for _, other in following]
            )
        if evidence is not None:
            client.set(self._key("evidence", slot), evidence)
        client.set(self._key("node", slot), msgspec.msgpack.encode(mine))
        count = client.add(self._key("nodes"), 0)
        self._count = count
        values = client.get(self._to_read(client, slot, count))
        beats = [beat for beat in map(_decoded, values) if beat is not None and (beat.slot in self._seen or not beat.finished)]
        now = time.monotonic()
        with self._changed:
            self._contact = now
            for beat in beats:
                before = self._seen.get(beat.slot)
                if before is None or before.beat.count != beat.count:
                    self._seen[beat.slot] = _Seen(beat, now, before is not None)
                if beat.asks and beat.order < mine.order and mine.answered != (beat.slot, beat.asks):
                    self._asked = (beat.slot, beat.asks)
            wanted = [beat.slot for beat in beats if mine.asks and beat.answered == (slot, mine.asks) and beat.slot not in self._gathered]
            left = [beat.slot for beat in beats if beat.answered == LAST and beat.slot not in self._left]
        if wanted or left:
            values = client.get([self._key("evidence", other) for other in [*wanted, *left]])
            with self._changed:
                self._gathered.update(zip(wanted, values, strict=False))
                self._left.update(zip(left, values[len(wanted) :], strict=True))
                self._changed.notify_all()
        if self._asked or any(beat.news or beat.dead for beat in beats):
            self._wake()

    def _leading(self, slot: int) -> list[int]:
        """Return the slots that matter to a node that does not report: of the reporter and, if it is silent, of those that would be next.

        Empty if this node may have to report. With many nodes, none reads all values only because the store is slow.
        """
        with self._lock:
            first = min((seen for seen in self._seen.values() if not seen.beat.finished), key=lambda seen: seen.beat.order, default=None)
            mine = self._mine.order
        if first is None or mine < first.beat.order:
            return []
        silent_s, beat = time.monotonic() - first.changed, first.beat
        reporter = self.reporter
        if silent_s > (LOST_S if slot in beat.successors else _LEADERS_LOST_S) and reporter is None:
            return []
        # Its successor, too, because a node that has not seen all others may take itself for the reporter at first.
        following = beat.successors[: None if silent_s > 2 * PERIOD_S else 1]
        return list({beat.slot, *following, *([reporter.slot] if reporter is not None else [])} - {slot})

    def _to_read(self, client: StoreClient, slot: int, count: int) -> list[str]:
        with self._lock:
            known = [other for other in self._seen if not self._seen[other].beat.finished]
        new = [other for other in range(count) if other != slot and other not in self._seen]
        if count > READ_ALL_NODES and (leading := self._leading(slot)):
            known, new = leading, []
        elif not self._seen:
            new = new[:READ_ALL_NODES]  # one of them reports, or names the node that does, unless it is this one
        # A node may have drawn its slot and not yet stored its value.
        return [self._key("node", other) for other in known] + client.existing([self._key("node", other) for other in new])


def nodes_key(restart: int) -> str:
    """Return the key of the number of nodes."""
    return _key(restart, "nodes")


def node_key(restart: int, slot: int) -> str:
    """Return the key of a node's value."""
    return _key(restart, "node", slot)


def _key(restart: int, *parts: object) -> str:
    return "/".join([_PREFIX, str(restart), *map(str, parts)])


def _decoded(value: bytes) -> Beat | None:
    try:
        return msgspec.msgpack.decode(value, type=Beat)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def store_address(members: Sequence[Member]) -> Address | None:
    """Return where the job's store is; None if all ranks are on this node, or if that is not known."""
    if not any(member.world_size > len(members) for member in members):
        return None
    meeting = meeting_of(members)
    if meeting is None or not meeting.port.isdecimal() or meeting.node_size == meeting.world_size:
        return None
    return Address(meeting.host, int(meeting.port))
