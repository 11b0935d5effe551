"""Reads the ranks' new records as they appear, and says which of them disagree: deferred verification.

What it may cost is bounded: a share of one core. Where that is not enough for what the ranks issue, it looks less often, then reads
only the newest records, and says how many it did not compare.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from commlens.blackbox.tail import BoxTail
from commlens.errors import FormatError
from commlens.text import format_ranks
from commlens.watch.agreement import Agreement, Feed, Found
from commlens.watch.roster import Member, Roster

EVERY_S: Final = 0.05
LATEST_S: Final = 0.5
SHARE: Final = 0.03  # of one core
AT_MOST: Final = 1 << 16  # records of a rank in one look
AT_LEAST: Final = 64
OTHERS_COME_WITHIN_S: Final = 1.0  # before ranks are blamed, the others of the group may come and show who is the odd one
SHIFT_LOOKS_AFTER_S: Final = (0.5, 1.0, 2.0, 4.0)  # how long after something odd, and after each look that showed nothing yet
SHIFT_LOOKS_APART_S: Final = 1.0  # a rank out of step must be seen twice
SHIFT_REST_S: Final = (4.0, 8.0, 16.0, 32.0, 64.0)  # after a suspicion that was none
SHIFTS_LOOKED_FOR: Final = 40


@dataclass
class Suspicion:
    """Something that the comparison found and that has not been told yet."""

    found: Found
    since: float  # time.monotonic()

    def is_ripe(self, now: float, *, someone_ended: bool) -> bool:
        """Whether all that can be known of it is there."""
        return someone_ended or now - self.since >= OTHERS_COME_WITHIN_S or not self.found.missing


class Comparing:
    """The live comparison of a job's ranks on this node.

    Args:
        roster: whose boxes are read.
        clock: seconds of CPU time that the calling thread has used.
    """

    def __init__(self, roster: Roster, *, clock: Callable[[], float] = time.thread_time) -> None:
        self._roster = roster
        self._clock = clock
        self._members: tuple[tuple[int, int, bool], ...] = ()
        self._feeds: list[Feed] = []
        self._agreement = Agreement(())
        self._at_most = AT_MOST
        self.interval_s = EVERY_S
        self.suspicions: list[Suspicion] = []
        self.records = 0
        self._missed_before = 0

    def look(self, now: float) -> None:
        """Read what is new and compare it. ``now`` is CLOCK_MONOTONIC, seconds."""
        self._follow(self._roster.current())
        if len(self._feeds) < 2:
            return
        began = self._clock()
        read = 0
        for feed in self._feeds:
            with contextlib.suppress(FormatError):  # the roster says what is wrong with it
                read += feed.poll(self._at_most)
        self.records += read
        self.suspicions += [Suspicion(found, now) for found in self._agreement.take_found()]
        self._keep_within(self._clock() - began, read)

    def _follow(self, members: list[Member]) -> None:
        """Begin anew when ranks have come: what they issued before is still in their boxes."""
        now = tuple((member.pid, member.rank, member.box is not None) for member in members if member.rank >= 0)
        if now == self._members:
            return
        self._members = now
        self._missed_before = self.missed
        self._agreement = Agreement(rank for _, rank, _ in now)
        self._feeds = []
        for member in members:
            if member.box is not None and member.rank >= 0:
                with contextlib.suppress(FormatError):
                    self._feeds.append(Feed(self._agreement, member.rank, BoxTail(member.box)))

    def _keep_within(self, spent_s: float, read: int) -> None:
        """Look less often, then at less, where it would cost more than its share."""
        needed = spent_s / SHARE
        self.interval_s = min(LATEST_S, max(EVERY_S, needed))
        if needed > LATEST_S and read:
            self._at_most = max(AT_LEAST, int(read / len(self._feeds) * LATEST_S / needed))
        elif self._at_most < AT_MOST:
            self._at_most = min(AT_MOST, self._at_most * 2)

    @property
    def missed(self) -> int:
        """Records that were not compared: overwritten before they were read, or passed over to stay cheap."""
        return self._missed_before + sum(feed.tail.missed for feed in self._feeds)

    def again(self, found: Found) -> int:
        """How often what was found has happened by now."""
        return self._agreement.again[(found.channel.key, found.aspect)]

    def rest(self, found: Found) -> None:
        """A suspicion of a shift was none: the next odd pair of lines counts again."""
        if found.lane is not None:
            found.lane.odd = False

    @property
    def coverage(self) -> str:
        """What was not compared, in words; empty where that is nothing."""
        missed, passed = self.missed, self._agreement.passed_over
        if not missed and not passed:
            return ""
        ranks = format_ranks(feed.rank for feed in self._feeds if feed.tail.missed)
        parts = [f"{missed} records of ranks {ranks or 'before a restart'} came too fast to be compared"] if missed else []
        parts += [f"{passed} collectives were not held against a rank that was more than 4096 behind"] if passed else []
        return "; ".join(parts)
