"""What a node knows of the other nodes of its job: their last beats, and the conclusions from
these: which nodes live, which one reports, which beats to read next, how long the others' ranks
wait, whether nodes issue different collectives.

A node that stops changing its beat is *silent*, and after ``lost_s`` seconds taken as *lost*. A
node that leaves says so in its last beat, and may leave its last evidence, in case its process
ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from commlens.watch.mismatches.channel_progress import differ
from commlens.watch.nodes.beat import Beat, Digests, News, unpack_digests
from commlens.watch.nodes.periods import LOST_S, PERIOD_S
from commlens.watch.open_waits import OpenWait

# with more, a node that does not report reads only the values of the reporter and its successor
READ_ALL_NODES: Final = 32
_LEADERS_LOST: Final = 4  # times as long, the reporter and those that would be next are all silent
_SUCCESSORS: Final = 8
_WAITS: Final = 8  # of other nodes that are compared with those here
# between comparisons of all nodes' records; doubled each time, because legal differences stay
EXAMINE_REST_S: Final = 1.0
_EXAMINE_REST_MAX_S: Final = 64.0


class Known(NamedTuple):
    """A node's last beat."""

    beat: Beat
    changed: float  # time.monotonic() at which it was first read
    lives: bool  # another beat was read before: else the node may have died before this one came


class NodesView(NamedTuple):
    """The conclusions from the values of all nodes of this node's incarnation. They hold until a
    value changes.
    """

    live: list[Beat]  # those that live, by slot
    until: float  # time.monotonic() at which one of them is taken as lost if it stays silent
    first: Beat | None  # of those that live: the one that would report
    waiting: list[Beat]  # those that live and say that a rank waits
    disagreeing: list[Beat]  # those that live and say that their ranks disagree
    digests: set[bytes]  # of those that live, packed
    dead: list[int]  # ranks that have died
    with_news: list[Beat]  # those that have lived and published lines
    successors: list[int]  # slots of the nodes that would report after this one

    def reporter(self, mine: Beat) -> Beat | None:
        """Return the node that reports; None if it is this one."""
        return self.first if self.first is not None and self.first.order < mine.order else None


class Lost(NamedTuple):
    """A node that has fallen silent."""

    beat: Beat
    silent_s: float  # since its last value was read
    by_itself: bool  # the others are not silent, or they are because it served the store
    read_every_s: float = 0.0  # how seldom its values are read; 0: about once a second


class KnownNodes:
    """The other nodes, by slot. Not safe for threads: ``NodesInSight`` holds its lock around every
    call.

    ``mine`` is always this node's own value: nodes of another incarnation of the job are left out.
    ``now`` is ``time.monotonic()``.
    """

    def __init__(self) -> None:
        self.lost_s = LOST_S
        """A node that has been silent for this long is taken as lost."""
        self.count = 0
        """How many nodes ever drew a slot."""
        self._by_slot: dict[int, Known] = {}
        self._version = 0  # it rises with each change of these
        self._view: tuple[object, NodesView] | None = None  # preceded by what it was made of
        self.last_evidence: dict[int, bytes] = {}
        """What nodes left behind that have left the exchange, by slot."""
        self._read_news: dict[int, int] = {}  # the highest number of news read, by slot

    def __contains__(self, slot: int) -> bool:
        return slot in self._by_slot

    @property
    def beats(self) -> list[Beat]:
        """The last values of all nodes, of any incarnation."""
        return [known.beat for known in self._by_slot.values()]

    def peers(self, mine: Beat) -> list[Known]:
        """Return the nodes of this node's incarnation of the job."""
        return [known for known in self._by_slot.values() if mine.shares_incarnation(known.beat)]

    def view(self, mine: Beat, now: float) -> NodesView:
        """Return the conclusions from all values. The watcher asks for them several times a second,
        and with ten thousand nodes drawing them takes a tenth of a second.
        """
        made_of = (
            self._version,
            self.lost_s,
            mine.slot,
            mine.ranks,
            mine.world_size,
            mine.ended_at,
        )
        if self._view is None or self._view[0] != made_of or now > self._view[1].until:
            self._view = (made_of, self._make_view(mine, now))
        return self._view[1]

    def _make_view(self, mine: Beat, now: float) -> NodesView:
        peers = self.peers(mine)
        living = self._living(peers, now)
        live = [known.beat for known in living]
        heard = [known.beat for known in peers if known.lives]
        unfinished = (known.beat.order for known in peers if not known.beat.finished)
        return NodesView(
            live,
            min((known.changed for known in living), default=now) + self.lost_s,
            min(live, key=lambda beat: beat.order, default=None),
            [beat for beat in live if beat.wait_id],
            [beat for beat in live if beat.disagreements],
            {bytes(beat.digests) for beat in live},
            sorted(itertools.chain.from_iterable(beat.dead for beat in heard)),
            list(filter(attrgetter("news"), heard)),
            [slot for _, slot in heapq.nsmallest(_SUCCESSORS, unfinished)],
        )

    def _living(self, peers: Sequence[Known], now: float) -> list[Known]:
        return [
            known
            for known in peers
            if now - known.changed <= self.lost_s and not known.beat.finished
        ]

    def lost(
        self, mine: Beat, now: float, *, after_s: float, without_store: bool, read_every_s: float
    ) -> list[Lost]:
        """Return the nodes that have been silent for this long without having left.

        Args:
            mine: this node's own value.
            now: ``time.monotonic()``.
            after_s: how long a node may be silent.
            without_store: the store is silent, too.
            read_every_s: as in :class:`Lost`.
        """
        return [
            Lost(beat, now - changed, not without_store or beat.serves_store, read_every_s)
            for beat, changed, lives in self.peers(mine)
            if lives and not beat.finished and now - changed > after_s
        ]

    def host(self, slot: int, own_host: str) -> str:
        """Return a name for a node: its host, with the slot if several nodes share one host (a
        container each).
        """
        hosts = [own_host, *(beat.host for beat in self.beats)]
        host = self._by_slot[slot].beat.host if slot in self._by_slot else "node"
        return host if hosts.count(host) == 1 else f"{host}-{slot}"

    def note(self, beats: Sequence[Beat], now: float) -> None:
        """Note the values that were just read."""
        # nodes that are known from another meeting place and have not come to this one
        missing = {slot: known for slot, known in self._by_slot.items() if slot < 0}
        for beat in beats:
            before = self._by_slot.get(beat.slot)
            for slot, known in missing.items() if before is None else ():
                if set(known.beat.ranks) & set(beat.ranks):
                    self._by_slot.pop(slot, None)
            if before is None or before.beat.count != beat.count:
                self._by_slot[beat.slot] = Known(beat, now, before is not None)
                self._version += 1

    def renumber(self) -> None:
        """Keep the nodes under slots below 0, because all nodes draw new slots in another meeting
        place. Nodes that do not come there stay lost.
        """
        former = [
            known._replace(beat=msgspec.structs.replace(known.beat, slot=-2 - slot, ended_at=0))
            for slot, known in self._by_slot.items()
        ]
        self._by_slot = {known.beat.slot: known for known in former if known.beat.slot <= -2}
        self.last_evidence, self._read_news = {}, {}
        self._version += 1

    # --- news and evidence

    def take_news(self, mine: Beat, now: float) -> list[tuple[str, News]]:
        """Return the lines of other nodes that were not taken before, each with its node's host."""
        new: list[tuple[str, News]] = []
        for beat in self.view(mine, now).with_news:
            new += [
                (beat.host, news)
                for news in beat.news
                if news.number > self._read_news.get(beat.slot, 0)
                and (not news.to or mine.slot in news.to)
            ]
            self._read_news[beat.slot] = beat.news[-1].number
        return new

    def evidence_left(self, mine: Beat) -> dict[int, bytes]:
        """Return the last evidence of the nodes that have left, by slot."""
        slots = [known.beat.slot for known in self.peers(mine)]
        return {slot: self.last_evidence[slot] for slot in slots if slot in self.last_evidence}

    # --- which values to read

    def to_read(self, mine: Beat, now: float) -> tuple[list[int], list[int]]:
        """Return the slots of the known nodes, and of the nodes not yet known, whose values to
        read.

        Args:
            mine: this node's value.
            now: when the last values were read.
        """
        if self.count > READ_ALL_NODES and (leading := self._leading(mine, now)):
            return leading, []
        known = [slot for slot, one in self._by_slot.items() if slot >= 0 and not one.beat.finished]
        new = [
            slot for slot in range(self.count) if slot != mine.slot and slot not in self._by_slot
        ]
        if not self._by_slot:
            # one of them reports, or names the node that does, unless it is this one
            new = new[:READ_ALL_NODES]
        return known, new

    def _leading(self, mine: Beat, now: float) -> list[int]:
        """Return the slots that matter to a node that does not report: the reporter's and, if that
        is silent, those of the nodes that would report next.

        Empty if this node may have to report. With many nodes, a slow store alone is no reason to
        read all values.
        """
        first = min(
            (known for known in self.peers(mine) if not known.beat.finished),
            key=lambda known: known.beat.order,
            default=None,
        )
        if first is None or mine.order < first.beat.order:
            return []
        silent_s, beat = now - first.changed, first.beat
        reporter = self.view(mine, now).reporter(mine)
        is_next = mine.slot in beat.successors
        if silent_s > self.lost_s * (1 if is_next else _LEADERS_LOST) and reporter is None:
            return []
        # Its successor, too, because a node that has not seen all others may take itself for the
        # reporter at first.
        late_s = 2 * PERIOD_S * self.lost_s / LOST_S
        following = beat.successors[: None if silent_s > late_s else 1]
        return list(
            {beat.slot, *following, *([reporter.slot] if reporter is not None else [])}
            - {mine.slot}
        )


class OldestWaits:
    """The waits in other nodes' beats, with their beginnings on this machine's clock."""

    def __init__(self) -> None:
        self._since_ns: dict[tuple[int, int], int] = {}  # by slot and wait_id, CLOCK_MONOTONIC
        self._oldest: list[OpenWait] = []
        self._made_of: NodesView | None = None

    def of(self, beats: Sequence[Beat], view: NodesView | None, now_ns: int) -> list[OpenWait]:
        """Return the oldest of these beats' waits. They are found anew only when the view of all
        beats has changed.
        """
        if view is None or view is not self._made_of:
            self._made_of = view
            # An age in a beat is old by up to a period: keep the first estimate of a wait's
            # beginning, so that the wait does not seem to begin anew.
            self._since_ns = {
                (beat.slot, beat.wait_id): self._since_ns.get(
                    (beat.slot, beat.wait_id), now_ns - int(beat.wait_s * 1e9)
                )
                for beat in beats
                if beat.wait_id
            }
            oldest = heapq.nsmallest(
                _WAITS, ((ns, slot) for (slot, _), ns in self._since_ns.items())
            )
            self._oldest = [OpenWait(ns, -1 - slot, "collective") for ns, slot in oldest]
        return self._oldest


class Disagreements:
    """Notices that ranks of different nodes issue different collectives."""

    def __init__(self) -> None:
        self._examined: dict[int, int] = {}  # by slot: the disagreements inside a node
        self._rest_until, self._rest_s = 0.0, EXAMINE_REST_S  # of the comparison of digests

    def take(self, view: NodesView, own_digests: msgspec.Raw, now: float) -> bool:
        """Return whether a node has counted new disagreements between its own ranks, or the digests
        of two nodes differ; the latter more and more seldom.
        """
        counted = {beat.slot: beat.disagreements for beat in view.disagreeing}
        if any(count > self._examined.get(slot, 0) for slot, count in counted.items()):
            self._examined |= counted
            return True
        if now < self._rest_until:
            return False
        first_seen: Digests = dict(unpack_digests(bytes(own_digests)))
        for packed in view.digests:
            for channel, blocks in unpack_digests(packed).items():
                if differ(first_seen.setdefault(channel, blocks), blocks):
                    self._rest_until = now + self._rest_s
                    self._rest_s = min(2 * self._rest_s, _EXAMINE_REST_MAX_S)
                    return True
        return False
