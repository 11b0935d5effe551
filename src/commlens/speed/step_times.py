"""Where the communication time of a training step goes: waited for, or hidden behind other work; by
group and by module or line.

Each rank's times are measured on its own clock. A step lasts from its first collective to the first
one of the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import mean
from typing import Final

import msgspec

from commlens.model.collective import ChannelKey, Collective, LearnedHow
from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog
from commlens.model.spans import Span, covered, length
from commlens.speed.bandwidth import ReachedRate, item_size, reached_rates
from commlens.speed.device_times import TimedCollective, is_message, timed_collectives
from commlens.speed.pace import (
    WaitTime,
    common_span,
    find_waits,
    on_device_ns,
    spans_in,
    timed_span,
)
from commlens.speed.rhythm import first_moments
from commlens.text import capital, frame_phrase, group_label, joined, ranks_phrase

_STEPS: Final = 64  # the newest of them
_PLACES: Final = 10  # rows below the groups
_FEW: Final = 0.05
_MIN_HIDDEN: Final = 0.01  # of the step
_RANKS: Final = 64  # of a job with more, the first hosts speak for all

_Arrivals = Mapping[tuple[ChannelKey, int], int]
"""By channel and sequence number: when the last rank issued the collective, Unix ns, if all ranks
of the channel are on one host.
"""


class StepPart(msgspec.Struct):
    """The communication of a group in a step, or in a second, or of the calls in one place on it:
    the mean over the ranks that take part.
    """

    group: str
    place: str = ""  # the module, if it is known, else op and line; empty: the whole group
    calls: float = 0.0
    payload_bytes: float = 0.0  # what each rank contributes
    waited_ns: int = 0  # exposed: the rank did nothing else
    hidden_ns: int = 0  # in flight while the rank did something else
    device_ns: int | None = None  # on an accelerator, waited for or hidden; None: none, or unknown


class RankTime(msgspec.Struct):
    """Where the time of a step goes on one rank: what is left is its own work."""

    rank: int
    waited_ns: int  # on the host, in collectives; on an accelerator, for late ranks
    sent_ns: int  # on an accelerator: in transfers of data
    messages_ns: int = 0  # of that, in messages, of which some ranks have more than others


class StepTimes(msgspec.Struct):
    """Where the communication time of a step goes: the mean over some steps and the ranks."""

    steps: int = 0  # 0: the records do not tell, see ``unknown``
    first_step: int = 0
    last_step: int = 0
    step_ns: int = 0
    waited_ns: int = 0
    hidden_ns: int = 0
    device_ns: int | None = None
    waited_by_rank: dict[int, int] = {}
    ranks: list[RankTime] = []
    waits_left_out: bool = False  # of devices, in groups with ranks that are not among these
    rates: list[ReachedRate] = []  # of the transfers that take most time
    parts: list[StepPart] = []  # groups, the longest wait first, each followed by its places
    places_left_out: int = 0
    unknown: list[str] = []  # what is not known, in sentences


_Where = tuple[str, ...]
"""Nothing, a collective's group, or its group and place: its module, if it is known, else op and
line.
"""


class _RankSteps:
    """The calls of one rank within a window."""

    def __init__(
        self, log: RankLog, window: Span, waits: Sequence[WaitTime], arrivals: _Arrivals
    ) -> None:
        self.log, self.window = log, window
        self.ops = [op for op in log.collectives if window[0] <= op.announced_ns < window[1]]
        self.flights = _by_where(
            WaitTime(op.announced_ns, _end(op, log, arrivals), op) for op in self.ops
        )
        self._waits = _by_where(
            wait for wait in waits if window[0] < wait.end_ns and wait.begin_ns < window[1]
        )
        self._waited = spans_in(waits, window)

    def part(self, where: _Where = ()) -> tuple[int, int, int]:
        """Return how long the collectives of a group or place, or all, were waited for, were in
        flight while nothing was waited for, and took on a device, in ns.
        """
        waits = spans_in(self._waits[where], self.window)
        on_host = (each for each in self.flights[where] if not each.op.channel.runs_ahead)
        flights = spans_in(on_host, self.window)
        hidden_ns = length(flights) - sum(covered(self._waited, *flight) for flight in flights)
        return length(waits), hidden_ns, on_device_ns(each.op for each in self.flights[where])


def _by_where(calls: Iterable[WaitTime]) -> dict[_Where, list[WaitTime]]:
    """Return waits or flights in all, by group, and by place: parts are asked for often."""
    found: dict[_Where, list[WaitTime]] = defaultdict(list)
    for call in calls:
        op, line = call.op, frame_phrase(call.op.source)
        place_of_op = op.module or (f"{op.op} at {line}" if line else op.op)
        where = group_label(op.channel.group), place_of_op
        for place in ((), where[:1], where):
            found[place].append(call)
    return found


def step_times(logs: Sequence[RankLog]) -> StepTimes:
    """Return where the time of the newest whole steps went, as far as the records of all ranks
    reach back.

    Args:
        logs: the ranks' records; of a running job, read at about the same time.
    """
    logs = _sample_of_hosts([log for log in logs if log.collectives])
    moments = {log.rank: first_moments(log) for log in logs}
    steps = _whole_steps(logs, moments)
    if not steps:
        return StepTimes(unknown=[_why_none(logs)])
    waits, arrivals = find_waits(logs), _last_arrivals(logs)
    windows = {
        log.rank: (moments[log.rank][steps[0]], moments[log.rank][steps[-1] + 1]) for log in logs
    }
    ranks = [_RankSteps(log, windows[log.rank], waits[log.rank], arrivals) for log in logs]
    number = len(steps)
    waited, hidden, device = zip(*(rank.part() for rank in ranks), strict=True)
    times = StepTimes(
        number,
        steps[0],
        steps[-1],
        round(mean(end - begin for begin, end in windows.values()) / number),
        round(mean(waited) / number),
        round(mean(hidden) / number),
        round(mean(device) / number) if any(device) else None,
        {rank.log.rank: ns // number for rank, ns in zip(ranks, waited, strict=True)},
    )
    # else only the moment between a call and its wait
    times.hidden_ns *= times.hidden_ns > _MIN_HIDDEN * times.step_ns
    times.unknown = _unknown(ranks, times)
    begins, ends = zip(*windows.values(), strict=True)
    timed = timed_collectives(logs, (min(begins), max(ends)))
    whole = [
        each for each in timed if is_message(each.op) or len(each.waited_ns) == len(each.key[2])
    ]
    times.waits_left_out = len(whole) < len(timed)
    if times.waits_left_out:
        times.unknown.append(
            "How long a device waits in a group with ranks that are not counted is not known."
        )
    times.ranks, times.rates = _rank_times(whole, windows, times), reached_rates(timed, logs)
    times.parts, times.places_left_out = _groups_and_places(ranks, number)
    return times


def _whole_steps(logs: Sequence[RankLog], moments: Mapping[int, Mapping[int, int]]) -> list[int]:
    """Return the newest steps that follow one another and that all records show from begin to end;
    of steps on a device, those whose durations are known, if any are.

    Args:
        logs: of the ranks.
        moments: by rank, when each step began (Unix ns).
    """
    until = timed_span(logs)[1] or inf
    whole = [
        {step for step in each if step + 1 in each and each[step + 1] <= until}
        for each in moments.values()
    ]
    return _newest_run(set.intersection(*whole)) if whole else []


def _rank_times(
    timed: Iterable[TimedCollective], windows: Mapping[int, Span], times: StepTimes
) -> list[RankTime]:
    """Return where each rank's time goes.

    Args:
        timed: the collectives on devices.
        windows: the time of the steps on each rank, Unix ns.
        times: the steps.
    """
    waited, sent, messages = (dict.fromkeys(windows, 0) for _ in range(3))
    for each in timed:
        for rank, ns in each.waited_ns.items():
            if windows[rank][0] <= each.op.announced_ns < windows[rank][1]:
                waited[rank] += ns - each.data_ns
                sent[rank] += each.transfer_ns + each.data_ns
                messages[rank] += each.data_ns
    return [
        RankTime(
            rank,
            on_host + waited[rank] // times.steps,
            sent[rank] // times.steps,
            messages[rank] // times.steps,
        )
        for rank, on_host in sorted(times.waited_by_rank.items())
    ]


def measure_traffic(logs: Sequence[RankLog]) -> list[StepPart]:
    """Return what the ranks do in each group in a second, as far as the records of all ranks reach
    back, by the time in collectives.
    """
    window = common_span(logs)
    if window[1] <= window[0]:
        return []
    waits = find_waits(logs)
    ranks = [_RankSteps(log, window, waits[log.rank], {}) for log in logs]
    return _parts(ranks, length([window]) * 1e-9, 1)


def _sample_of_hosts(logs: Sequence[RankLog]) -> list[RankLog]:
    """Return the logs of some whole hosts in a large job."""
    by_host = grouped((log.host, log) for log in logs)
    some: list[RankLog] = []
    for host in by_host.values():
        if some and len(some) + len(host) > _RANKS:
            break
        some += host
    return some


def _newest_run(steps: set[int]) -> list[int]:
    """Return the newest steps that follow one another."""
    run: list[int] = []
    for step in sorted(steps, reverse=True):
        if (run and step != run[-1] - 1) or len(run) == _STEPS:
            break
        run.append(step)
    return run[::-1]


def _why_none(logs: Sequence[RankLog]) -> str:
    if not logs:
        return "No collective is recorded."
    if not any(log.steps for log in logs):
        return "No step is known: none of the ranks has called the step() of a torch optimizer."
    return (
        "The records of all ranks do not reach back to one whole step in common; with the setting"
        " box_entries they reach back further."
    )


def _last_arrivals(logs: Sequence[RankLog]) -> _Arrivals:
    hosts = {log.rank: log.host for log in logs}
    issued = grouped(
        ((op.channel.key, op.sequence_number), op.announced_ns)
        for log in logs
        for op in log.collectives
        if not op.is_point_to_point
    )
    return {
        key: max(moments)
        for key, moments in issued.items()
        if len(moments) == len(key[0][2]) and len({hosts.get(rank) for rank in key[0][2]}) == 1
    }


def _end(op: Collective, log: RankLog, arrivals: _Arrivals) -> int:
    """Return when a collective on a CPU ended, as far as it is known (Unix ns).

    One that C++ waits for is found complete long after; it certainly lasts until the last rank has
    issued it.
    """
    if op.in_flight:
        return log.captured_ns
    if op.wait_ended_ns or op.learned_how is LearnedHow.RETURN:
        return max(op.wait_ended_ns, op.returned_ns)
    return min(
        arrivals.get((op.channel.key, op.sequence_number), op.announced_ns),
        op.done_ns or op.announced_ns,
    )


def _groups_and_places(ranks: Sequence[_RankSteps], steps: int) -> tuple[list[StepPart], int]:
    """Return the groups, each followed by its places, and how many places are left out."""
    places = _parts(ranks, steps, 2)
    shown = places[:_PLACES]
    parts = [
        part
        for group in _parts(ranks, steps, 1)
        for part in (group, *(place for place in shown if place.group == group.group))
    ]
    return parts, len(places) - len(shown)


def _parts(ranks: Sequence[_RankSteps], steps: float, level: int) -> list[StepPart]:
    """Return the groups (level 1) or their places (2), the longest wait first."""
    called = dict.fromkeys(where for rank in ranks for where in rank.flights if len(where) == level)
    return sorted((_part(ranks, where, steps) for where in called), key=_weight)


def _weight(part: StepPart) -> tuple[float, float]:
    return (-part.waited_ns - part.hidden_ns - (part.device_ns or 0), -part.payload_bytes)


def _part(ranks: Sequence[_RankSteps], where: _Where, steps: float) -> StepPart:
    taking_part = [rank for rank in ranks if where in rank.flights]
    found = [rank.part(where) for rank in taking_part]
    each = 1 / steps / len(taking_part)
    ops = [flight.op for rank in taking_part for flight in rank.flights[where]]
    tensors = [spec for op in ops for spec in op.args.payload]
    payload = sum(spec.numel * item_size(spec.dtype) for spec in tensors)
    waited, hidden, device = (round(sum(values) * each) for values in zip(*found, strict=True))
    return StepPart(
        where[0],
        "".join(where[1:]),
        len(ops) * each,
        payload * each,
        waited,
        hidden,
        device or None,
    )


def _unknown_on_devices(ops: Sequence[Collective]) -> list[str]:
    ahead = [op for op in ops if op.channel.runs_ahead]
    if not ahead:
        return []
    where = joined(sorted({op.channel.device for op in ahead}))
    untimed = (
        ""
        if any(op.duration_ns for op in ahead)
        else ", and neither is their time on the device, without the setting timing"
    )
    return [
        f"On {where} the host does not wait in collectives, so how much of their time is hidden"
        f" behind computation is not known{untimed}; `commlens trace --profile` measures both."
    ]


def _unknown(ranks: Sequence[_RankSteps], times: StepTimes) -> list[str]:
    """Return sentences about the facts that these records do not show."""
    ops = [op for rank in ranks for op in rank.ops]
    found = _unknown_on_devices(ops)
    if times.hidden_ns:
        found.append(
            "A collective may have ended before the rank waited for it, so less may be hidden than"
            " shown."
        )
    # else found just before the wait
    if sum(op.learned_how is LearnedHow.POLL and not op.wait_ended_ns for op in ops) > _FEW * len(
        ops
    ):
        found.append(
            "Some collectives ended and no wait for them is recorded: time for which C++ waited for"
            " them is in neither figure."
        )
    world, here = (
        max((rank.log.world_size for rank in ranks), default=0),
        {rank.log.rank for rank in ranks},
    )
    if world > len(here):
        found.append(
            f"{capital(ranks_phrase(set(range(world)) - here))}"
            f" {'is' if world - len(here) == 1 else 'are'} not counted."
        )
    return found
