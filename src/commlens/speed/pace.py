"""How fast a running job is, and which ranks make it slow.

Ranks that are fast enough wait in collectives; a slow rank does not wait, because the others are
there already. So the rank that waits least, while all others wait, costs the job as much time as
the others wait at least. This needs no clock in common: each rank's waits are measured on its own
clock, also where the ranks are on several nodes. On an accelerator the host does not wait; there
the collective's time on the device counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Final, NamedTuple

from commlens.model.collective import ChannelKey, Collective, LearnedHow
from commlens.model.ranklog import RankLog
from commlens.model.spans import Span, union
from commlens.text import group_label

MIN_COST: Final = 0.1  # of the time
MIN_STEPS: Final = 50
MIN_S: Final = 20.0
MIN_SAMPLES: Final = 5
AGREEING: Final = 0.8  # of the samples
_NS: Final = 1e-9
_MIN_COLLECTIVES: Final = 10  # of a rank, in a sample
_FEW: Final = 0.05  # of the collectives


class Pace(NamedTuple):
    """One sample of a running job."""

    window_s: float  # seconds that the records cover
    steps: int  # optimizer steps completed since the last sample
    waited_s: dict[int, float]  # rank: time in collectives
    step_s: float = 0.0  # average time of these steps
    # rank: time in which it was ready to run and had no CPU, if known
    no_cpu_s: Mapping[int, float] = MappingProxyType({})
    is_whole: bool = True  # False: some waits for ranks on other nodes were not recorded


class Traffic(NamedTuple):
    """What a rank does in groups of one name, on average over the ranks, in a sample."""

    group: str  # the description, such as a mesh dimension's name
    collectives_per_s: float
    bytes_per_s: float  # of payload: what each rank contributes
    waiting: float  # share of the time


class Slow(NamedTuple):
    """Ranks that make a job slow."""

    ranks: list[int]
    cost: float  # share of the time in which all other ranks wait
    steps: int
    step_s: float
    no_cpu: float  # share of the time in which they were ready to run and had no CPU
    no_cpu_others: float


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
        None if there are fewer ranks or too few records, or the time in collectives is not known:
            on an accelerator without
        the setting timing.
    """
    logs = list(logs)
    begin = max(
        (log.collectives[0].announced_ns if log.collectives else log.captured_ns for log in logs),
        default=0,
    )
    begin = max(begin, since_ns)
    end = min([log.captured_ns for log in logs] + [until_ns] * bool(until_ns), default=0)
    if len(logs) < least or end <= begin:
        return None
    waited: dict[int, float] = {}
    steps = []
    unseen = reaching = 0
    here = {log.rank for log in logs}
    # A group of many ranks is compared once, not for each of its collectives.
    groups = {id(op.channel.group): op.channel.group for log in logs for op in log.collectives}
    reaching_groups = {each for each, group in groups.items() if not here.issuperset(group.ranks)}
    waits = find_waits(logs)
    for log in logs:
        inside = [op for op in log.collectives if begin <= op.announced_ns < end]
        on_device = [op for op in inside if op.channel.device != "cpu"]
        if len(inside) < _MIN_COLLECTIVES or any(
            op.duration_ns is None and not op.in_flight for op in on_device
        ):
            return None
        intervals = ((max(wait.begin_ns, begin), min(wait.end_ns, end)) for wait in waits[log.rank])
        total = sum(
            last - first
            for first, last in union(
                interval for interval in intervals if interval[0] < interval[1]
            )
        )
        waited[log.rank] = (total + sum(op.duration_ns or 0 for op in on_device)) * _NS
        steps.append(inside[-1].step - inside[0].step)
        far = [
            op
            for op in inside
            if op.channel.device == "cpu"
            and id(op.channel.group) in reaching_groups
            and not op.in_flight
        ]
        reaching += len(far)
        unseen += sum(_waits_unseen(op) for op in far)
    window_s = (end - begin) * _NS
    return Pace(
        window_s, min(steps), waited, window_s / max(1, *steps), is_whole=unseen <= _FEW * reaching
    )


def measure_traffic(logs: Sequence[RankLog]) -> list[Traffic]:
    """Return what the ranks do in each group, as far as the records of all ranks reach back, by the
    time in collectives.
    """
    begin = max((log.collectives[0].announced_ns for log in logs if log.collectives), default=0)
    end = min((log.captured_ns for log in logs), default=0)
    if end <= begin:
        return []
    calls: dict[str, int] = defaultdict(int)
    payload: dict[str, int] = defaultdict(int)
    waited: dict[str, int] = defaultdict(int)
    ranks: dict[str, set[int]] = defaultdict(set)
    waits = find_waits(logs)
    for log in logs:
        intervals: dict[str, list[Span]] = defaultdict(list)
        for wait in waits[log.rank]:
            if begin < wait.end_ns and wait.begin_ns < end:
                intervals[group_label(wait.op.channel.group)].append(
                    (max(begin, wait.begin_ns), min(end, wait.end_ns))
                )
        for name, each in intervals.items():
            waited[name] += sum(last - first for first, last in union(each))
        for op in log.collectives:
            if begin <= op.announced_ns < end:
                name = group_label(op.channel.group)
                ranks[name].add(log.rank)
                calls[name] += 1
                payload[name] += payload_bytes(op)
    window_s = (end - begin) * _NS
    found = [
        Traffic(
            name,
            calls[name] / window_s / len(ranks[name]),
            payload[name] / window_s / len(ranks[name]),
            waited[name] * _NS / window_s / len(ranks[name]),
        )
        for name in calls
    ]
    return sorted(found, key=lambda traffic: -traffic.waiting)


def payload_bytes(op: Collective) -> int:
    """Return the bytes that a rank contributes to a collective."""
    return sum(spec.numel * _item_size(spec.dtype) for spec in op.args.payload)


def _item_size(dtype: str) -> int:
    """Return the bytes of an element: ``"bfloat16"`` has 2, ``"bool"`` 1."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


class Wait(NamedTuple):
    """A time in which a rank was in a collective, or waited for one. Unix ns."""

    begin_ns: int
    end_ns: int
    op: Collective


def find_waits(logs: Iterable[RankLog]) -> dict[int, list[Wait]]:
    """Return each rank's waits on the host, sorted.

    DDP waits for its collectives in C++ at the end of the backward pass, which the tap does not
    see. There the last collective of a step counts, and the wait lasts until all ranks of the host
    have issued it: clocks of several hosts differ.
    """
    found: dict[int, list[Wait]] = {}
    hosts: dict[int, str] = {}
    # channel, host, step: each rank's last one
    unseen: dict[tuple[ChannelKey, str, int], dict[int, Collective]] = defaultdict(dict)
    for log in logs:
        waits = found[log.rank] = []
        hosts[log.rank] = log.host
        for op in log.collectives:
            if op.channel.device != "cpu" or not op.announced_ns:
                continue
            still = log.captured_ns if op.in_flight else 0
            waits.append(Wait(op.announced_ns, op.returned_ns or still or op.announced_ns, op))
            if op.wait_began_ns:
                waits.append(
                    Wait(op.wait_began_ns, op.wait_ended_ns or still or op.wait_began_ns, op)
                )
            elif _waits_unseen(op):
                unseen[op.channel.key, log.host, op.step][log.rank] = op
    for (key, host, _), by_rank in unseen.items():
        numbers = {op.sequence_number for op in by_rank.values()}
        if len(numbers) == 1 and len(by_rank) == sum(hosts.get(rank) == host for rank in key[2]):
            last = max(op.announced_ns for op in by_rank.values())
            for rank, op in by_rank.items():
                found[rank].append(Wait(op.announced_ns, last, op))
    return {rank: sorted(waits, key=lambda wait: wait[:2]) for rank, waits in found.items()}


def _waits_unseen(op: Collective) -> bool:
    """Return whether a thread may have waited for a collective in C++, where nobody records it."""
    return (
        not op.wait_began_ns
        and not op.is_point_to_point
        and op.learned_how is not LearnedHow.RETURN
    )


def find_slow_ranks(
    paces: Sequence[Pace], before: Slow | None = None, *, sufficient: bool = False
) -> Slow | None:
    """Return the ranks that make a job slow; None if there are none, or the samples are too few or
    do not agree.

    Args:
        paces: samples, oldest first.
        before: the ranks that were found last. They remain slow as long as some ranks cost half of
            what names a rank, so that a verdict does not come and go.
        sufficient: the samples are enough, as each node has found of its own.
    """
    slow = _find_slow(paces, MIN_COST, sufficient=sufficient)
    if (
        slow is None
        and before is not None
        and _find_slow(paces, MIN_COST / 2, sufficient=sufficient)
    ):
        return before
    return slow


def _find_slow(paces: Sequence[Pace], min_cost: float, *, sufficient: bool) -> Slow | None:
    if (
        not _are_of_the_same_ranks(paces)
        or len(paces[0].waited_s) < 2
        or not (sufficient or _suffices(paces))
    ):
        return None
    window_s, steps = sum(pace.window_s for pace in paces), sum(pace.steps for pace in paces)
    waited = {rank: sum(pace.waited_s[rank] for pace in paces) for rank in paces[0].waited_s}
    ranks, cost_s = _low_side(waited)
    if cost_s < min_cost * window_s:
        return None
    others = set(waited) - set(ranks)
    agreeing = [
        pace
        for pace in paces
        if min(pace.waited_s[rank] for rank in others) - max(pace.waited_s[rank] for rank in ranks)
        > min_cost / 2 * pace.window_s
    ]
    if len(agreeing) < AGREEING * len(paces):
        return None
    step_s = median(pace.step_s for pace in paces)
    return Slow(
        sorted(ranks),
        cost_s / window_s,
        steps,
        step_s,
        _without_cpu(paces, ranks),
        _without_cpu(paces, others),
    )


def _are_of_the_same_ranks(paces: Sequence[Pace]) -> bool:
    return len({frozenset(pace.waited_s) for pace in paces}) == 1


def shares(pace: Pace) -> list[tuple[float, list[int]]]:
    """Return the share of the time that ranks were in collectives, to one percent, and which ranks,
    the lowest first.
    """
    found: dict[float, list[int]] = defaultdict(list)
    for rank, waited in sorted(pace.waited_s.items()):
        found[round(waited / pace.window_s, 2)].append(rank)
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


def find_slow_in_records(logs: Sequence[RankLog]) -> Slow | None:
    """Return the ranks that made a job slow for as long as the records of all ranks reach back;
    None if there are none.
    """
    begin = max((log.collectives[0].announced_ns for log in logs if log.collectives), default=0)
    end = min((log.captured_ns for log in logs), default=0)
    number = MIN_SAMPLES + 1
    edges = [begin + (end - begin) * part // number for part in range(number + 1)]
    paces = [measure(logs, first, last) for first, last in pairwise(edges)]
    return find_slow_ranks([pace for pace in paces if pace is not None])


def recent(paces: Sequence[Pace]) -> list[Pace]:
    """Return the newest samples that suffice to find slow ranks; all if they do not."""
    return next(
        (
            list(paces[-taken:])
            for taken in range(MIN_SAMPLES, len(paces))
            if _suffices(paces[-taken:])
        ),
        list(paces),
    )


def condensed(paces: Sequence[Pace]) -> list[Pace]:
    """Return the newest samples of a node merged into ``MIN_SAMPLES``, for the node that compares
    all ranks of the job.

    Returns:
        Nothing if they are too few, or do not show the waits for ranks on other nodes.
    """
    newest = recent(paces)
    if (
        not _suffices(newest)
        or not _are_of_the_same_ranks(newest)
        or not all(pace.is_whole for pace in newest)
    ):
        return []
    edges = [len(newest) * part // MIN_SAMPLES for part in range(MIN_SAMPLES + 1)]
    return [_merged(newest[first:last]) for first, last in pairwise(edges)]


def _merged(paces: Sequence[Pace]) -> Pace:
    steps = sum(pace.steps for pace in paces)
    waited = {rank: sum(pace.waited_s[rank] for pace in paces) for rank in paces[0].waited_s}
    return Pace(
        sum(pace.window_s for pace in paces),
        steps,
        waited,
        sum(pace.steps * pace.step_s for pace in paces) / steps,
    )


def of_all_nodes(nodes: Iterable[Sequence[Pace]]) -> list[Pace]:
    """Merge the nodes' samples, the first of each node with the first of the others, into samples
    of all ranks: as shares of the time.
    """
    return [
        Pace(
            1.0,
            min(pace.steps for pace in together),
            {
                rank: waited / pace.window_s
                for pace in together
                for rank, waited in pace.waited_s.items()
            },
            median(pace.step_s for pace in together),
        )
        for together in zip(*nodes, strict=True)
    ]


def with_cpu(slow: Slow, paces: Sequence[Pace]) -> Slow:
    """Add how long the slow ranks of this node were ready to run without a CPU, which only this
    node's own samples show.
    """
    here = [rank for rank in slow.ranks if paces and rank in paces[0].waited_s]
    return slow._replace(no_cpu=_without_cpu(paces, here))


def _suffices(paces: Sequence[Pace]) -> bool:
    steps, total_s = (
        sum(pace.steps for pace in paces),
        sum(pace.steps * pace.step_s for pace in paces),
    )
    return len(paces) >= MIN_SAMPLES and total_s >= MIN_S and steps >= MIN_STEPS
