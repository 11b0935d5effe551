"""How fast a running job is, and which ranks make it slow.

Ranks that are fast enough wait in collectives; a slow rank does not wait, because the others are
there already. So the rank that waits least, while all others wait, costs the job as much time as
the others wait at least. This needs no clock in common: each rank's waits are measured on its own
clock, also where the ranks are on several nodes: each node publishes how long its ranks wait, and
the node that reports compares all. On an accelerator the host does not wait; there the device does
(:mod:`commlens.speed.device_times`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Final, NamedTuple

from commlens.model.collective import Collective, LearnedHow
from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog
from commlens.model.spans import Span, common, length, union
from commlens.speed.device_times import (
    DeviceTimes,
    TimedCollective,
    TransferTrend,
    are_timed,
    device_times,
    timed_collectives,
    timed_until,
)
from commlens.speed.rhythm import PeriodicPause, find_period, first_moments, round_starts

MIN_COST: Final = 0.1  # of the time
MIN_COST_ON_DEVICE: Final = 0.05  # durations of collectives vary less than times on a host
MIN_STEPS: Final = 50
MIN_S: Final = 20.0
MIN_SAMPLES: Final = 5
AGREEING: Final = 0.8  # of the samples
_NS: Final = 1e-9
_MIN_COLLECTIVES: Final = 10  # of a rank, in a sample
_FEW: Final = 0.05  # of the collectives
_MIN_PIECE_S: Final = 1.0  # that is measured by itself, on a device
_PIECE_S: Final = 5.0  # of records that are measured at once
_PIECES_MAX: Final = 60
# of the time. Where no rank counts steps, ranks that wait for longer may wait for work.
_MAX_COST_OF_ROUNDS: Final = 0.5


class Pace(NamedTuple):
    """One sample of a running job."""

    window_s: float  # seconds that the records cover
    steps: int  # optimizer steps completed since the last sample
    waited_s: dict[int, float]  # rank: time in collectives
    step_s: float = 0.0  # average time of these steps
    # rank: time in which it was ready to run and had no CPU, if known
    no_cpu_s: Mapping[int, float] = MappingProxyType({})
    is_whole: bool = True  # False: some waits for ranks on other nodes were not recorded
    begin_ns: int = 0  # Unix
    sent_s: Mapping[int, float] = MappingProxyType({})  # rank: time in transfers of its device
    # the least and the greatest share of the time that ranks which are called slow cost the others
    min_cost: float = MIN_COST
    max_cost: float = 1.0
    step: int = 0  # in which it begins
    # the steps are rounds of collectives, because no rank counts those of an optimizer
    by_rounds: bool = False


class SlowRanks(NamedTuple):
    """Ranks that make a job slow."""

    ranks: list[int]
    cost: float  # share of the time in which all other ranks wait
    steps: int
    step_s: float
    no_cpu: float  # share of the time in which they were ready to run and had no CPU
    no_cpu_others: float
    since_ns: int = 0  # Unix; 0: they were slow in all samples
    since_step: int = 0
    slower: float | None = None  # how many times as long a step takes since then
    by_rounds: bool = False  # the steps are rounds of collectives


def measure(
    logs: Iterable[RankLog], since_ns: int = 0, until_ns: int = 0, *, least: int = 2
) -> Pace | None:
    """Return how long each rank was in collectives, as far as the records of all ranks reach back.

    Args:
        logs: of a running job, read at about the same time.
        since_ns: leave out what was before (Unix ns).
        until_ns: leave out what was after; 0: nothing.
        least: how many ranks there must be.

    Returns:
        None if there are fewer ranks or too few records, or the times of the collectives on a
            device are not known.
    """
    logs = list(logs)
    begin, end = timed_span(logs)
    begin, end = max(since_ns, begin), min(end, until_ns or end)
    if len(logs) < least or end <= begin:
        return None
    return _measure_pieces(logs, [begin, end], timed_collectives(logs, (begin, end)))[0]


def _measure_pieces(
    logs: Sequence[RankLog], edges: Sequence[int], timed: Iterable[TimedCollective]
) -> list[Pace | None]:
    """Return the pace between any two edges (Unix ns) that follow one another; None where there are
    too few records or durations.

    Args:
        logs: of all ranks.
        edges: in order.
        timed: the collectives on devices in this time.
    """
    inside: list[dict[int, list[Collective]]] = [{log.rank: [] for log in logs} for _ in edges[1:]]
    for log in logs:
        for op in log.collectives:
            if edges[0] <= op.announced_ns < edges[-1]:
                inside[bisect_right(edges, op.announced_ns) - 1][log.rank].append(op)
    waits = find_waits(logs)
    on_device = device_times(timed, edges)
    counts_steps = any(log.steps for log in logs)
    rounds = {} if counts_steps else {log.rank: round_starts(log) for log in logs}
    return [
        _pace_of(window, ops, times, waits, rounds)
        for window, ops, times in zip(pairwise(edges), inside, on_device, strict=True)
    ]


def _pace_of(
    window: Span,
    inside: Mapping[int, Sequence[Collective]],
    on_device: DeviceTimes,
    waits: Mapping[int, Sequence[WaitTime]],
    rounds: Mapping[int, Sequence[int]],
) -> Pace | None:
    """Return the pace in a window.

    Args:
        window: Unix ns.
        inside: the collectives that each rank issued in it.
        on_device: where the devices' time in it went.
        waits: of each rank's host.
        rounds: when each rank began a round, if no rank counts steps.
    """
    if not all(len(ops) >= _MIN_COLLECTIVES and are_timed(ops) for ops in inside.values()):
        return None
    waited = {
        rank: (length(spans_in(waits[rank], window)) + on_device.waited.get(rank, 0)) * _NS
        for rank in inside
    }
    steps = [_steps_in(window, ops, rounds.get(rank)) for rank, ops in inside.items()]
    are_ahead = all(ops[-1].channel.runs_ahead for ops in inside.values())
    has_messages = any(op.is_point_to_point for ops in inside.values() for op in ops)
    window_s = length([window]) * _NS
    return Pace(
        window_s,
        min(steps),
        waited,
        window_s / max(1, *steps),
        is_whole=_sees_other_nodes(inside),
        begin_ns=window[0],
        sent_s={rank: ns * _NS for rank, ns in on_device.sent.items()},
        min_cost=MIN_COST_ON_DEVICE if are_ahead and not has_messages else MIN_COST,
        step=max(ops[0].step for ops in inside.values()),
        by_rounds=bool(rounds),
        max_cost=_MAX_COST_OF_ROUNDS if rounds else 1.0,
    )


def _steps_in(window: Span, ops: Sequence[Collective], rounds: Sequence[int] | None) -> int:
    """Return how many steps a rank began in a window, or rounds if no rank counts steps."""
    if rounds is None:
        return ops[-1].step - ops[0].step
    return bisect_left(rounds, window[1]) - bisect_left(rounds, window[0])


class PaceMeter:
    """Measures a running job again and again: each time what came since the last time."""

    def __init__(self, now_ns: int) -> None:
        self.until_ns = now_ns  # of the last measurement, Unix
        self.transfers = TransferTrend()  # on devices

    def measure(self, logs: Sequence[RankLog], least: int, piece_s: float) -> list[Pace]:
        """Return the pace since the last time, oldest first.

        Durations on a device become known for many seconds at once: then it is measured in pieces.

        Args:
            logs: of all ranks, read just now.
            least: how many ranks there must be.
            piece_s: how long a piece is, or a little longer.
        """
        begin, end = timed_span(logs)
        begin = max(self.until_ns, begin)
        if end == common_span(logs)[1]:  # nothing runs on a device
            self.until_ns = end
            pace = measure(logs, begin, least=least)
            return [pace] if pace is not None else []
        if (end - begin) * _NS < _MIN_PIECE_S or len(logs) < least:
            return []
        self.until_ns = end
        edges = _edges((begin, end), max(1, int((end - begin) * _NS / piece_s)))
        timed = timed_collectives(logs, (begin, end))
        found = _measure_pieces(logs, edges, timed)
        known = [window for window, pace in zip(pairwise(edges), found, strict=True) if pace]
        self.transfers.add(timed, known)
        return [pace for pace in found if pace is not None]


def _edges(span: Span, number: int) -> list[int]:
    """Return the edges of a number of equal parts of a span."""
    begin, end = span
    return [begin + (end - begin) * part // number for part in range(number + 1)]


def timed_span(logs: Sequence[RankLog]) -> Span:
    """Return the time span for which all ranks have records, and durations of what runs on a
    device.
    """
    return common_span(logs)[0], min(map(timed_until, logs), default=0)


def common_span(logs: Iterable[RankLog]) -> Span:
    """Return the time span for which all ranks have records."""
    begin = max((log.collectives[0].announced_ns for log in logs if log.collectives), default=0)
    return begin, min((log.captured_ns for log in logs), default=0)


def spans_in(waits: Iterable[WaitTime], window: Span) -> list[Span]:
    """Return the times within a window in which a rank was in one of the waits."""
    return common(union((wait.begin_ns, wait.end_ns) for wait in waits), [window])


def on_device_ns(ops: Iterable[Collective]) -> int:
    """Return how long collectives took on a device."""
    return sum(op.duration_ns or 0 for op in ops if op.channel.runs_ahead)


def _sees_other_nodes(inside: Mapping[int, Sequence[Collective]]) -> bool:
    """Return whether nearly all waits for ranks on other nodes were recorded."""
    ended = [
        op
        for ops in inside.values()
        for op in ops
        if not op.channel.runs_ahead and not op.in_flight
    ]
    # A group of many ranks is compared with the ranks here once, not for each of its collectives.
    groups = {id(op.channel.group): op.channel.group for op in ended}
    reaching = {each for each, group in groups.items() if not inside.keys() >= {*group.ranks}}
    far = [op for op in ended if id(op.channel.group) in reaching]
    return sum(map(_waits_unseen, far)) <= _FEW * len(far)


class WaitTime(NamedTuple):
    """A time in which a rank was in a collective, or waited for one. Unix ns."""

    begin_ns: int
    end_ns: int
    op: Collective


def find_waits(logs: Iterable[RankLog]) -> dict[int, list[WaitTime]]:
    """Return each rank's waits on the host, sorted, each on the rank's own clock."""
    found = {}
    for log in logs:
        waits = []
        for op in log.collectives:
            if op.channel.runs_ahead or not op.announced_ns:
                continue
            still = log.captured_ns if op.in_flight else 0
            for begin, end in (
                (op.announced_ns, op.returned_ns),  # in the call
                (op.wait_began_ns, op.wait_ended_ns),
            ):
                if begin:
                    waits.append(WaitTime(begin, end or still or begin, op))
        found[log.rank] = sorted(waits, key=lambda wait: wait[:2])
    return found


def _waits_unseen(op: Collective) -> bool:
    """Return whether a thread may have waited for a collective in C++, where it is not recorded."""
    return (
        not op.wait_began_ns
        and not op.is_point_to_point
        and op.learned_how is not LearnedHow.RETURN
    )


def find_slow_ranks(
    paces: Sequence[Pace], before: SlowRanks | None = None, *, sufficient: bool = False
) -> SlowRanks | None:
    """Return the ranks that make a job slow; None if there are none, or the samples are too few or
    do not agree.

    Args:
        paces: samples, oldest first.
        before: the ranks that were found last. They remain slow as long as some ranks cost half of
            what names a rank, so that a verdict does not come and go.
        sufficient: the samples are enough, as each node has found of its own.
    """
    slow = _find_slow(paces, sufficient=sufficient)
    if slow is None and before is not None and _find_slow(paces, 0.5, sufficient=sufficient):
        return before
    return slow


def _find_slow(paces: Sequence[Pace], part: float = 1.0, *, sufficient: bool) -> SlowRanks | None:
    """Return the ranks that cost at least a part of what names a rank."""
    if not (sufficient or suffice(paces)) or len(paces[0].waited_s) < 2:
        return None
    window_s, steps = sum(pace.window_s for pace in paces), sum(pace.steps for pace in paces)
    waited = {rank: sum(pace.waited_s[rank] for pace in paces) for rank in paces[0].waited_s}
    ranks, cost_s = _low_side(waited)
    min_cost = part * max(pace.min_cost for pace in paces)
    if not min_cost * window_s <= cost_s <= paces[0].max_cost * window_s:
        return None
    agreeing = [pace for pace in paces if _makes_wait(pace, ranks, min_cost)]
    if len(agreeing) < AGREEING * len(paces):
        return None
    return SlowRanks(
        sorted(ranks),
        cost_s / window_s,
        steps,
        step_s=median(pace.step_s for pace in paces),
        no_cpu=_without_cpu(paces, ranks),
        no_cpu_others=_without_cpu(paces, waited.keys() - ranks),
        by_rounds=paces[0].by_rounds,
    )


def with_since(slow: SlowRanks, paces: Sequence[Pace]) -> SlowRanks:
    """Add when ranks became slow: the beginning of the newest samples, one after the other, in
    which all others wait for them; and how much longer steps take since then. Nothing is added if
    they were slow in all samples, or not in the newest.
    """
    first = len(paces)
    while first and _makes_wait(paces[first - 1], slow.ranks, paces[first - 1].min_cost):
        first -= 1
    if first in (0, len(paces)):
        return slow
    before, after = (
        median(pace.step_s for pace in part) for part in (paces[:first], paces[first:])
    )
    return slow._replace(
        since_ns=paces[first].begin_ns,
        since_step=paces[first].step,
        slower=round(after / before, 2),
    )


def _makes_wait(pace: Pace, ranks: Iterable[int], min_cost: float) -> bool:
    """Return whether all others wait longer than these ranks, by half of the cost at least."""
    ranks = set(ranks)
    ours = [waited for rank, waited in pace.waited_s.items() if rank in ranks]
    others = [waited for rank, waited in pace.waited_s.items() if rank not in ranks]
    gap = min(others, default=0.0) - max(ours, default=0.0)
    return gap > min_cost / 2 * pace.window_s


def shares(pace: Pace) -> list[tuple[float, list[int]]]:
    """Return the share of the time that ranks were in collectives, to one percent, and which ranks,
    the lowest first.
    """
    found = grouped(
        (round(waited / pace.window_s, 2), rank) for rank, waited in sorted(pace.waited_s.items())
    )
    return sorted(found.items())


def waits_least(pace: Pace) -> tuple[list[int], float]:
    """Return the ranks, fewer than half of them (one of two), that wait least, and the share of the
    time that all others wait longer.
    """
    ranks, gap_s = _low_side(pace.waited_s)
    return sorted(ranks), gap_s / pace.window_s


def _low_side(waited: Mapping[int, float]) -> tuple[list[int], float]:
    """Return the ranks below the widest gap, fewer than half of all (one of two), and the gap."""
    order = sorted(waited, key=lambda rank: waited[rank])
    most = max(1, (len(order) - 1) // 2)
    best, gap = 1, 0.0
    for size in range(1, most + 1):
        here = waited[order[size]] - waited[order[size - 1]]
        if here > gap:
            best, gap = size, here
    return order[:best], gap


def _without_cpu(paces: Sequence[Pace], ranks: Iterable[int]) -> float:
    known = [
        pace.no_cpu_s[rank] / pace.window_s
        for pace in paces
        for rank in ranks
        if rank in pace.no_cpu_s
    ]
    return sum(known) / len(known) if known else 0.0


def find_slow_in_records(logs: Sequence[RankLog]) -> SlowRanks | None:
    """Return the ranks that made a job slow in the newest records of all ranks, or for as long as
    these reach back; None if there are none.
    """
    span = timed_span(logs)
    seconds = length([span]) * _NS
    if len(logs) < 2 or seconds <= 0:
        return None
    number = min(_PIECES_MAX, max(MIN_SAMPLES + 1, int(seconds / _PIECE_S)))
    measured = _measure_pieces(logs, _edges(span, number), timed_collectives(logs, span))
    paces = [pace for pace in measured if pace is not None]
    slow = find_slow_ranks(recent(paces)) or find_slow_ranks(paces)
    if slow is None or find_periodic_waits(slow, logs) is not None:
        return None
    return with_since(slow, paces)


def find_periodic_waits(slow: SlowRanks, logs: Sequence[RankLog]) -> PeriodicPause | None:
    """Return how often the others wait for slow ranks, if most of their waits come periodically:
    then these ranks have something to do now and then, such as to write a checkpoint.

    Args:
        slow: the ranks.
        logs: of all ranks of a node.
    """
    waited: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # by step, rank
    for rank, waits in find_waits(logs).items():
        for wait in waits:
            waited[wait.op.step][rank] += wait.end_ns - wait.begin_ns
    for timed in timed_collectives(logs, timed_span(logs)):
        for rank, ns in timed.waited_ns.items():
            waited[timed.op.step][rank] += ns
    ranks = {log.rank for log in logs}
    ours, others = ranks & {*slow.ranks}, ranks - {*slow.ranks}
    if not ours or not others:
        return None
    lost = {
        step: min(by_rank[rank] for rank in others) - max(by_rank[rank] for rank in ours)
        for step, by_rank in waited.items()
    }
    first = next(log for log in logs if log.rank in ours)
    pause = find_period([*first_moments(first).items()], lost)
    return pause if pause is not None and pause.share > slow.cost / 2 else None


def recent(paces: Sequence[Pace]) -> list[Pace]:
    """Return the newest samples that suffice to find slow ranks; all if they do not."""
    for taken in range(MIN_SAMPLES, len(paces)):
        if suffice(paces[-taken:]):
            return list(paces[-taken:])
    return list(paces)


def with_cpu(slow: SlowRanks, paces: Sequence[Pace]) -> SlowRanks:
    """Add how long the slow ranks of this node were ready to run without a CPU, which only this
    node's own samples show.
    """
    here = [rank for rank in slow.ranks if paces and rank in paces[0].waited_s]
    return slow._replace(no_cpu=_without_cpu(paces, here))


def suffice(paces: Sequence[Pace]) -> bool:
    """Return whether samples are of the same ranks, and enough to find slow ones among them."""
    steps = sum(pace.steps for pace in paces)
    total_s = sum(pace.steps * pace.step_s for pace in paces)
    are_enough = len(paces) >= MIN_SAMPLES and total_s >= MIN_S and steps >= MIN_STEPS
    return are_enough and len({frozenset(pace.waited_s) for pace in paces}) == 1


Sample = tuple[int, float, dict[int, int]]
"""Steps; seconds per step; by rank, the per mille of the time in collectives."""


class Judgement(NamedTuple):
    """The slow ranks of the job, as found by the node that reports."""

    slow: SlowRanks | None  # None: no rank is slow
    ranks: list[int]  # all ranks that were compared


def condensed(paces: Sequence[Pace]) -> list[Sample]:
    """Return the newest samples of a node merged into ``MIN_SAMPLES``, for the node that compares
    all ranks of the job.

    Returns:
        Nothing if they are too few, or do not show the waits for ranks on other nodes, or the
            optimizer steps.
    """
    newest = recent(paces)
    if not suffice(newest) or not all(pace.is_whole and not pace.by_rounds for pace in newest):
        return []
    edges = [len(newest) * part // MIN_SAMPLES for part in range(MIN_SAMPLES + 1)]
    found: list[Sample] = []
    for part in (newest[first:last] for first, last in pairwise(edges)):
        steps, window_s = sum(pace.steps for pace in part), sum(pace.window_s for pace in part)
        step_s = sum(pace.steps * pace.step_s for pace in part) / steps
        waited = {rank: sum(pace.waited_s[rank] for pace in part) for rank in part[0].waited_s}
        shares = {rank: round(1000 * waited_s / window_s) for rank, waited_s in waited.items()}
        found.append((steps, round(step_s, 6), shares))
    return found


def judge(nodes: Sequence[Sequence[Sample]], before: Judgement | None) -> Judgement | None:
    """Compare the ranks of all nodes of a job: the first sample of each node with the first of the
    others.

    Args:
        nodes: each node's samples, as many of each.
        before: the last judgement.

    Returns:
        None if a node has not published enough samples: then each node judges its own ranks.
    """
    if not all(nodes) or len({len(samples) for samples in nodes}) > 1:
        return None
    paces = [
        Pace(
            1.0,
            min(steps for steps, _, _ in together),
            {rank: share / 1000 for _, _, shares in together for rank, share in shares.items()},
            median(step_s for _, step_s, _ in together),
        )
        for together in zip(*nodes, strict=True)
    ]
    slow = find_slow_ranks(paces, before.slow if before is not None else None, sufficient=True)
    return Judgement(slow, sorted(rank for samples in nodes for rank in samples[0][2]))
