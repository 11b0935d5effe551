"""Learns from a job how long its ranks may wait before the watcher looks at the wait: three times
the longest recent wait in the same collective at the same line, and 5 s at least.

The ranks do nothing for this. A wait that lasts is seen in the header of the rank's box, which the
watcher polls anyway; only then is the collective's place read from the records. Shorter waits do
not change the limit. Records that the watcher reads for other reasons are counted, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from commlens.config import AUTO, Settings
from commlens.errors import FormatError
from commlens.model.ranklog import RankLog, UsualWait
from commlens.speed.usual import CallPlace, UsualWaits, is_of_first_step, place_of
from commlens.watch.open_waits import OpenWait
from commlens.watch.roster import Member

log = logging.getLogger("commlens")

FACTOR: Final = 3.0  # times the longest recent wait
FLOOR_S: Final = 5.0
LONG_S: Final = FLOOR_S / FACTOR  # a shorter wait leaves the limit at its floor
_NEWEST: Final = 100  # records that show whether a place is known
_READS_MAX: Final = 2  # boxes that are read at one moment, about 2 ms each


class _Waiting(NamedTuple):
    """A collective that a rank has been in for long."""

    number: int  # its index
    since_ns: int  # CLOCK_MONOTONIC
    place: CallPlace | None  # None: it could not be read


class StallLimit:
    """The limits of the places where ranks of this node wait now.

    Args:
        settings: nothing is learned if its stall_timeout is a number.
    """

    def __init__(self, settings: Settings) -> None:
        self.learns = settings.stall_timeout == AUTO
        self._usual = UsualWaits()
        self._waiting: dict[int, _Waiting] = {}  # by pid
        self._now_s = 0.0

    def follow(self, members: Sequence[Member], now_ns: int, *, resumed_ns: int = 0) -> None:
        """Note which ranks have been waiting for long, and which of these waits are over.

        Args:
            members: of this node.
            now_ns: CLOCK_MONOTONIC.
            resumed_ns: when the job went on after a pause of all ranks, which is no wait.
        """
        if self.learns:
            with self._stopping_after_error():
                self._follow(members, now_ns, resumed_ns)

    def add_records(self, logs: Iterable[RankLog]) -> None:
        """Count the collectives of records that were read for another reason."""
        if self.learns:
            with self._stopping_after_error():
                for each in logs:
                    self._usual.add_records(each, self._now_s)

    @contextlib.contextmanager
    def _stopping_after_error(self) -> Iterator[None]:
        """Learn nothing more after an error: stalls are still reported at the stall timeout."""
        try:
            yield
        except Exception as error:
            self.learns, self._waiting = False, {}
            log.warning(
                "commlens: how long waits usually are is no longer learned: %s: %s",
                type(error).__name__,
                error,
            )
            log.debug("the error", exc_info=True)

    def _follow(self, members: Sequence[Member], now_ns: int, resumed_ns: int) -> None:
        self._now_s = now_ns / 1e9
        now: dict[int, _Waiting] = {}
        reads = 0
        for member in members:
            status = member.status
            if status is None or not member.alive or not status.oldest_index:
                continue
            number, since_ns = status.oldest_index, max(status.oldest_mono_ns, resumed_ns)
            known = self._waiting.get(member.pid)
            if known is not None and known.number == number:
                now[member.pid] = known._replace(since_ns=since_ns)
            elif now_ns - since_ns >= LONG_S * 1e9 and reads < _READS_MAX:
                reads += 1
                now[member.pid] = _Waiting(number, since_ns, self._read_place(member))
        for pid, before in self._waiting.items():
            has_ended = pid not in now or now[pid].number != before.number
            if has_ended and before.place is not None:
                self._usual.add(before.place, (now_ns - before.since_ns) / 1e9, self._now_s)
        self._waiting = now

    def usual(self, pid: int) -> UsualWait | None:
        """Return how long waits usually are where a rank waits now; None if that is not known."""
        waiting = self._waiting.get(pid)
        if waiting is None or waiting.place is None:
            return None
        durations = self._usual.known(waiting.place)
        if durations is None:
            return None
        longest_s = durations.longest_s(self._now_s)
        return UsualWait(
            durations.times,
            round(durations.median_s, 6),
            round(longest_s, 6),
            round(max(FLOOR_S, FACTOR * longest_s), 1),
        )

    def applied(self, waiting: Iterable[OpenWait]) -> list[OpenWait]:
        """Return the waits with their limits, as far as these are known."""
        return [
            wait._replace(limit_s=usual.limit_s)
            if wait.kind == "collective" and (usual := self.usual(wait.pid)) is not None
            else wait
            for wait in waiting
        ]

    def _read_place(self, member: Member) -> CallPlace | None:
        """Return the place where a rank waits, and count the records before it. None if the place
        is unknown, or in the first step, from which nothing is learned.
        """
        status = member.status
        if member.box is None or status is None:
            return None
        after = max(0, status.issued - status.oldest_index) + 1
        try:
            found = member.box.log(newest=min(status.capacity, after + _NEWEST))
        except FormatError:
            return None  # the roster reports it
        self._usual.add_records(found, self._now_s)
        op = next((op for op in found.collectives if op.index == status.oldest_index), None)
        return place_of(op) if op is not None and not is_of_first_step(op) else None
