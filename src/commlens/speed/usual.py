"""How long ranks usually are in the collectives of one place, and what they need between them."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from commlens.model.collective import ChannelKey, Collective, Stack, State
from commlens.model.ranklog import RankLog

KNOWN_AFTER: Final = 3  # collectives that have completed in a place
RECENT_S: Final = 3600.0
_KEPT: Final = 64  # durations of a place
_PLACES_MAX: Final = 2000


class CallPlace(NamedTuple):
    """Where a program issues a collective.

    The whole call path distinguishes phases: what training, an evaluation and a checkpoint issue
    from one line of a helper are different places.
    """

    channel: ChannelKey
    op: str
    stack: Stack


def place_of(op: Collective) -> CallPlace:
    """Return the place of a collective."""
    return CallPlace(op.channel.key, op.op, op.stack)


def is_of_first_step(op: Collective) -> bool:
    """Return whether a rank had not completed an optimizer step when it issued a collective."""
    return op.step == 0


def time_inside_s(op: Collective) -> float | None:
    """Return for how long a completed collective was in flight; None if that is not known."""
    if op.state is not State.COMPLETED:
        return None
    end_ns = op.ended_ns
    return (end_ns - op.announced_ns) / 1e9 if end_ns >= op.announced_ns > 0 else None


def usual_gap_s(log: RankLog, awaited: Collective) -> float | None:
    """Return how long a rank usually is outside of collectives where it is now.

    Args:
        log: of the rank, which has issued no collective since.
        awaited: the one in which others wait for it.

    Returns:
        The median of the times between a collective like its last one and one like the awaited one,
            in seconds; None if there are too few. Only those count that cross the end of an
            optimizer step, or that do not, as the present one does.
    """
    if not log.collectives:
        return None
    last = log.collectives[-1]
    ends = place_of(last), place_of(awaited)
    is_stepping = log.steps > last.step
    gaps = [
        max(0, after.announced_ns - max(before.returned_ns, before.wait_ended_ns))
        for before, after in pairwise(log.collectives)
        if (after.step > before.step) == is_stepping and (place_of(before), place_of(after)) == ends
    ]
    return median(gaps) / 1e9 if len(gaps) >= KNOWN_AFTER else None


class Durations:
    """The durations of one place.

    The longest one counts for at least half of :data:`RECENT_S`, and at most for all of it.
    """

    def __init__(self, now_s: float) -> None:
        self.times = 0
        self._newest: deque[float] = deque(maxlen=_KEPT)
        self._began_s = now_s  # of the present half
        self._longest = [0.0, 0.0]  # of the half before, and of the present one

    def add(self, seconds: float, now_s: float) -> None:
        """Add the duration of a collective that has completed."""
        self._age(now_s)
        self.times += 1
        self._newest.append(seconds)
        self._longest[1] = max(self._longest[1], seconds)

    def longest_s(self, now_s: float) -> float:
        """Return the longest recent one."""
        self._age(now_s)
        return max(self._longest)

    @property
    def median_s(self) -> float:
        """The median of the newest ones."""
        return median(self._newest) if self._newest else 0.0

    def _age(self, now_s: float) -> None:
        halves = int((now_s - self._began_s) / (RECENT_S / 2))
        if halves > 0:
            self._longest = [self._longest[1] if halves == 1 else 0.0, 0.0]
            self._began_s = now_s


class UsualWaits:
    """The durations of all places that a node's ranks have come to. Times are of one clock, in
    seconds.
    """

    def __init__(self) -> None:
        self._places: dict[CallPlace, Durations] = {}
        self._counted: dict[int, int] = {}  # by pid: index of the newest record that was counted

    def add_records(self, log: RankLog, now_s: float) -> None:
        """Add the collectives of a rank that have completed, each once. Those of the first step are
        left out: it loads and compiles.
        """
        counted = self._counted.get(log.pid, 0)
        # The records of one place share their channel and stack, whose hashes would be computed
        # again for each.
        found: dict[tuple[int, int, str], Durations] = {}
        for op in log.collectives:
            if op.index <= counted or is_of_first_step(op):
                continue
            if (seconds := time_inside_s(op)) is None:
                continue
            key = (id(op.channel), id(op.stack), op.op)
            if key not in found:
                found[key] = self._at(place_of(op), now_s)
            found[key].add(seconds, now_s)
        if log.collectives:
            self._counted[log.pid] = max(counted, log.collectives[-1].index)

    def add(self, place: CallPlace, seconds: float, now_s: float) -> None:
        """Add one wait that is over."""
        self._at(place, now_s).add(seconds, now_s)

    def known(self, place: CallPlace) -> Durations | None:
        """Return the durations of a place; None if too few collectives have completed there."""
        durations = self._places.get(place)
        return durations if durations is not None and durations.times >= KNOWN_AFTER else None

    def _at(self, place: CallPlace, now_s: float) -> Durations:
        durations = self._places.get(place)
        if durations is None:
            if len(self._places) >= _PLACES_MAX:
                del self._places[next(iter(self._places))]
            durations = self._places[place] = Durations(now_s)
        return durations
