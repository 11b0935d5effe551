"""The other nodes of a job as this one sees them, the place where it meets them, and this node's
own beat, by which they see it.

The thread of the exchange reads the other nodes' beats and stores this node's; the watcher asks
here at any time, and changes this node's beat, which the thread stores next.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from commlens.text import ranks_phrase
from commlens.watch.nodes.beat import Beat, News
from commlens.watch.nodes.calls import Poke
from commlens.watch.nodes.known_nodes import (
    Disagreements,
    KnownNodes,
    Lost,
    NodesView,
    OldestWaits,
)
from commlens.watch.nodes.meeting_places import Place
from commlens.watch.nodes.periods import LOST_S, PERIOD_S, rest_period_s
from commlens.watch.open_waits import OpenWait

_NEWS_KEPT: Final = 4  # lines in a beat


class LostStore(NamedTuple):
    """The store in which the nodes met, and which they no longer reach."""

    place: Place
    silent_s: float
    refuses: bool  # connections are refused: the process that served it has ended
    beats: list[Beat]  # of the nodes that are out of sight without it


class Contact:
    """The meeting places, and which of them answered when. Not safe for threads.

    Moments are ``time.monotonic()``; 0.0: not yet.
    """

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        """Where the nodes may meet; the first is where they do."""
        self.given_up: list[Place] = []
        """Places before it, which did not answer."""
        self.has_joined = False
        """A rank of this node has passed ``init_process_group``."""
        self.answered_at = 0.0
        """The moment of the last answer."""
        self.refuses = False
        """The present place refuses connections."""
        self.lost_since = 0.0
        """The moment of the first error since the last answer, or in a place that was given up."""
        self.lost_refused = False
        """That error, or a later one, was a refused connection."""

    @property
    def lost_place(self) -> Place:
        """The place that was lost first, if any was."""
        return (self.given_up or self.places)[0]

    def is_lost(self, after_s: float) -> bool:
        """Return whether the place refuses connections, or has been silent for this long."""
        return self.refuses or time.monotonic() - self.answered_at > after_s

    def note_answer(self, now: float) -> None:
        """Note that the place answers."""
        self.answered_at, self.refuses = now, False
        if not self.given_up:
            self.lost_since, self.lost_refused = 0.0, False

    def note_error(self, error: OSError) -> None:
        """Note that the place does not answer, if one ever did. Before that, and before a rank here
        has joined, rank 0 may not have made the store yet.
        """
        if self.answered_at and self.has_joined:
            self.lost_since = self.lost_since or time.monotonic()
            if isinstance(error, ConnectionRefusedError):  # its process has ended: it did serve
                self.refuses = self.lost_refused = True


class NodesInSight:
    """This node's beat, and what follows from the beats of the other nodes.

    Args:
        host: this machine's name.
        folder: where this node saves dumps, and the meeting place of nodes that reach no store.
    """

    def __init__(self, host: str, folder: Path | None) -> None:
        self._host, self._folder = host, folder
        # guards all that the watcher and the thread of the exchange share
        self._changed = threading.Condition(threading.Lock())
        self._poke = Poke()  # ends the thread's rest
        self._contact = Contact([])
        self._reset()

    def _reset(self) -> None:
        """Know no other node yet, and be known to none."""
        folder = os.path.abspath(self._folder) if self._folder else ""  # noqa: PTH100
        self._mine = Beat(-1, self._host, [], dump_dir=folder)
        self._contact = Contact(self._contact.places)
        self._known = KnownNodes()
        self._oldest_waits = OldestWaits()
        self._disagreements = Disagreements()
        self._announced = 0.0  # time.monotonic() of the last line of news; 0.0: none yet

    # --- this node's beat

    def update(self, **fields: object) -> None:
        """Change fields of this node's beat. The others hear of deaths and ends at once."""
        with self._changed:
            changed = {name for name, value in fields.items() if getattr(self._mine, name) != value}
            if changed:
                self._mine = msgspec.structs.replace(self._mine, **fields)
        if changed & {"dead", "finished", "ended"}:
            self._poke.set()

    def announce(
        self, text: str, *, kind: str = "", abort: bool = False, to: Sequence[int] = ()
    ) -> None:
        """Let the other nodes print a line, or those with the slots ``to``."""
        with self._changed:
            news = self._mine.news
            self._announced = time.monotonic()
            number = (news[-1].number if news else 0) + 1
            self._mine = msgspec.structs.replace(
                self._mine, news=[*news, News(number, text, kind, abort, [*to])][-_NEWS_KEPT:]
            )
        self._poke.set()

    # --- the other nodes

    @property
    def port(self) -> int:
        """The port of the store in which the nodes meet; 0: none."""
        return next((getattr(place, "port", 0) for place in self._contact.places), 0)

    @property
    def others(self) -> list[Beat]:
        """The other nodes that live, by slot; empty without a store."""
        view = self._view()
        return list(view.live) if view is not None else []

    @property
    def reporter(self) -> Beat | None:
        """The node that reports; None if it is this one."""
        view = self._view()
        return view.reporter(self._mine) if view is not None else None

    def _view(self) -> NodesView | None:
        """Return the conclusions from the beats of the other nodes; None without a store."""
        with self._changed:
            if self._contact.is_lost(self._known.lost_s):
                return None
            return self._known.view(self._mine, time.monotonic())

    @property
    def ranks(self) -> set[int]:
        """The ranks of the other nodes that live or have left their evidence."""
        with self._changed:
            left = self._known.evidence_left(self._mine).keys()
            gone = [
                known.beat for known in self._known.peers(self._mine) if known.beat.slot in left
            ]
        return {rank for beat in (*self.others, *gone) for rank in beat.ranks}

    @property
    def dead_elsewhere(self) -> list[int]:
        """The ranks of other nodes that died."""
        with self._changed:
            return self._known.view(self._mine, time.monotonic()).dead

    @property
    def dump(self) -> str:
        """The folder of the reporter's last dump; empty if there is none yet."""
        reporter = self.reporter
        return reporter.dump if reporter is not None else ""

    def host(self, slot: int) -> str:
        """Return a name for another node: its host, with the slot if several nodes share one host
        (a container each).
        """
        with self._changed:
            return self._known.host(slot, self._host)

    def waits(self, now_ns: int) -> list[OpenWait]:
        """Return the oldest waits of other nodes, one of each node. If another node reports for the
        job, its beat holds the oldest of all.
        """
        view, reporter = self._view(), self.reporter
        beats = [] if view is None else view.waiting if reporter is None else [reporter]
        return self._oldest_waits.of(beats, view, now_ns)

    def take_news(self) -> list[tuple[str, News]]:
        """Return the lines of other nodes that were not taken before, each with its node's host."""
        with self._changed:
            return self._known.take_news(self._mine, time.monotonic())

    def take_disagreement(self, now: float) -> bool:
        """Return whether ranks of other nodes, or whole nodes, seem to issue different collectives,
        so that all records should be compared. The same signs return True only now and then.
        """
        view = self._view()
        return view is not None and self._disagreements.take(view, self._mine.digests, now)

    # --- nodes and stores that were lost

    def lost(self, after_s: float) -> list[Lost]:
        """Return the nodes that have been silent for this long without having left; all nodes, if
        the store is silent. With many nodes, each is heard less often, so the time is longer.
        """
        rest_s = rest_period_s(self._known.count)
        seldom_s = rest_s if rest_s > PERIOD_S else 0.0
        with self._changed:
            if seldom_s:
                after_s = max(after_s, self._known.lost_s)
            return self._known.lost(
                self._mine,
                time.monotonic(),
                after_s=0.0 if self._contact.refuses else after_s,
                without_store=self._contact.is_lost(after_s),
                read_every_s=seldom_s,
            )

    def sentences_on_lost(self) -> list[str]:
        """Return sentences about the other nodes that are out of sight: nodes that fell silent
        without leaving, or all, if the store fell silent.
        """
        lost, contact = self.lost(LOST_S), self._contact
        if not lost or not (contact.given_up or contact.is_lost(self._known.lost_s)):
            return [
                f"Node {each.beat.host} ({ranks_phrase(each.beat.ranks)}) no longer answers."
                for each in lost
            ]
        how = (
            "has ended"
            if contact.lost_refused
            else f"has not answered for {min(each.silent_s for each in lost):.0f} s"
        )
        if contact.given_up:
            how += f", and they have not come to {contact.places[0]}"
        ranks = ranks_phrase(rank for each in lost for rank in each.beat.ranks)
        return [f"Of {ranks} on other nodes nothing is known: {contact.lost_place} {how}."]

    @property
    def lost_store(self) -> LostStore | None:
        """The store that was lost; None if no store was lost, if the nodes meet elsewhere, or if
        all nodes had ended.
        """
        contact = self._contact
        if not contact.lost_since or self.others:
            return None
        with self._changed:
            living = (known.beat for known in self._known.peers(self._mine) if known.lives)
            beats = [beat for beat in living if not (beat.finished or beat.ended)]
            silent_s = time.monotonic() - contact.lost_since
            lost = LostStore(contact.lost_place, silent_s, contact.lost_refused, beats)
            return lost if beats else None
