"""The rhythm of a job: the rounds of one without optimizer steps, since when steps take longer, and
what comes again after a number of steps.

A training loop repeats itself, and so do an evaluation and a loop with an optimizer of its own. Its
rounds are told from its collectives. A program whose ranks wait for commands repeats itself, too,
and all its ranks wait for the one that gives the commands. So rounds count only if they come at
regular intervals, and if no rank waits in them for one certain rank, as in a broadcast or message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, time, timedelta, timezone
from itertools import pairwise
from statistics import mean, median, quantiles
from typing import Final, NamedTuple

from msgspec.structs import replace

from commlens.model.collective import Collective
from commlens.model.grouping import grouped
from commlens.model.ops import ROOTED
from commlens.model.ranklog import RankLog

_ROUNDS: Final = 8  # at least, that show that a job has rounds
_UNEVEN: Final = 1.2  # the mean round against the median: pauses between rounds
_SPREAD: Final = 0.5  # of the median, by which the middle half of the rounds differ
_ADDRESSED: Final = 0.1  # broadcasts and messages in a round, beyond which ranks may take commands
_SIDE: Final = 10  # steps on each side of a change
_CHANGE: Final = 1.1
_LONG: Final = 0.5  # of a usual step, by which a long one is longer
_TIMES: Final = 3  # that show a period
_OFF: Final = 0.1  # of a period, by which it varies
_OFTEN: Final = 3  # steps: what comes more often is in all steps
_NS: Final = 1e-9


def round_starts(log: RankLog) -> list[int]:
    """Return when a rank began each round of its collectives (Unix ns); nothing if they do not show
    rounds, or the rank counts the steps of an optimizer.
    """
    if log.steps or not log.collectives:
        return []
    moments = grouped(
        ((op.op, op.channel.key, op.call_lines), op.announced_ns) for op in log.collectives
    )
    often = [each for each in moments.values() if len(each) >= _ROUNDS]
    starts = max(often, key=lambda each: median(_intervals(each)), default=[])
    addressed = sum(op.is_point_to_point or op.op in ROOTED for op in log.collectives)
    if not starts or addressed > _ADDRESSED * len(starts):
        return []
    times = _intervals(starts)
    first, usual, third = quantiles(times, n=4)
    is_regular = third - first <= _SPREAD * usual and mean(times) <= _UNEVEN * usual
    return starts if is_regular else []


def first_moments(log: RankLog) -> dict[int, int]:
    """Return when each step but the first issued its first collective (Unix ns)."""
    first: dict[int, int] = {}
    for op in log.collectives:
        if op.announced_ns:
            first.setdefault(op.step, op.announced_ns)
    return {step: first[step] for step in sorted(first)[1:]}


def since(logs: Sequence[RankLog], when: int | time | datetime) -> list[RankLog]:
    """Return the logs with only the collectives since a step, or since a time in UTC. A time of day
    is the one closest to the newest record.
    """
    if isinstance(when, int):
        step = when
        return [_filtered(log, lambda op: op.step >= step) for log in logs]
    if isinstance(when, time):
        newest = max(
            (log.collectives[-1].announced_ns for log in logs if log.collectives), default=0
        )
        end = datetime.fromtimestamp(newest * _NS, timezone.utc)
        zone = when.tzinfo or timezone.utc
        days = [end.date() + timedelta(days) for days in (-1, 0, 1)]
        when = min(
            (datetime.combine(day, when, zone) for day in days), key=lambda at: abs(at - end)
        )
    when_ns = int((when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp() / _NS)
    return [_filtered(log, lambda op: op.announced_ns >= when_ns) for log in logs]


def _filtered(log: RankLog, is_kept: Callable[[Collective], bool]) -> RankLog:
    return replace(log, collectives=[op for op in log.collectives if is_kept(op)])


def _intervals(moments: Sequence[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(moments)]


class StepChange(NamedTuple):
    """Steps that take longer than the ones before."""

    step: int  # the first of them
    since_ns: int  # Unix
    before_ns: float  # median
    after_ns: float  # median

    @property
    def ratio(self) -> float:
        """How many times as long they take."""
        return self.after_ns / self.before_ns


def find_change(moments: Sequence[tuple[int, int]]) -> StepChange | None:
    """Return since when steps take longer, at the step that divides them best; None if they do not,
    or if they are few.

    Args:
        moments: steps that follow one another, and when each began (Unix ns).
    """
    times = _intervals([moment for _, moment in moments])
    # By the order of their times, a pause counts no more than any other long step.
    order = sorted(range(len(times)), key=times.__getitem__)
    places = {at: place for place, at in enumerate(order)}
    best, highest, total = 0, 0.0, 0
    for at in range(1, len(times)):
        total += places[at - 1]
        # how far the places before this step are below the mean of all
        below = (len(times) - 1) / 2 * at - total
        if _SIDE <= at <= len(times) - _SIDE and below > highest:
            best, highest = at, below
    if not best:
        return None
    change = StepChange(*moments[best], median(times[:best]), median(times[best:]))
    is_sharp = min(quantiles(times[best:], n=4)) > max(quantiles(times[:best], n=4))
    return change if is_sharp and change.after_ns >= _CHANGE * change.before_ns > 0 else None


class PeriodicPause(NamedTuple):
    """Steps that take longer again and again, after the same number of steps or the same time."""

    steps: int  # between two of them
    seconds: float  # between two of them
    extra_s: float  # for which such a step takes longer, in the median
    share: float  # of the time
    times: int
    newest: int  # the newest such step


def find_period(
    moments: Sequence[tuple[int, int]], extra_ns: Mapping[int, float]
) -> PeriodicPause | None:
    """Return the long steps that come periodically: a checkpoint, an evaluation, a collection of
    garbage; None if none do.

    Args:
        moments: steps, and when each began (Unix ns).
        extra_ns: by step, the time that counts as longer than usual.
    """
    times = _intervals([moment for _, moment in moments])
    long = [
        each for each in moments[:-1] if extra_ns.get(each[0], 0.0) > _LONG * median(times or [0])
    ]
    if len(long) < _TIMES:
        return None
    steps, between = (_intervals(each) for each in zip(*long, strict=True))
    if max(map(_variation, (steps, between))) > _OFF or median(steps) < _OFTEN:
        return None
    extra = [extra_ns[step] for step, _ in long]
    return PeriodicPause(
        round(median(steps)),
        median(between) * _NS,
        median(extra) * _NS,
        sum(extra) / max(1, moments[-1][1] - moments[0][1]),
        len(long),
        long[-1][0],
    )


def longer_than_usual(moments: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Return by how much each step takes longer than the median, in ns."""
    times = _intervals([moment for _, moment in moments])
    usual = median(times or [0])
    return {step: ns - usual for (step, _), ns in zip(moments[:-1], times, strict=True)}


def _variation(values: Sequence[int]) -> float:
    """Return by which part of their median values differ from it at most."""
    usual = median(values)
    return max(abs(value - usual) for value in values) / max(1.0, usual)
