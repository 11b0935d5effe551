"""Ranks that make a running job slow: where they spend their time, and what holds them back. In
other tools' dumps, the rank that comes last again and again.

``speed.pace`` has found that the others wait for rank 3 for 40 % of each step. The reason is looked
for in this order: its process could not run (CPU limit, memory, no free core); of a job on GPUs,
its device is late (more work, a slow link, a slow GPU); a line in which its samples show it more
often than another rank's; and the two collectives between which it takes longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, sqrt
from statistics import median
from typing import Final, NamedTuple

from commlens.diagnosis.causes.context import Case, Context, source_of
from commlens.diagnosis.index.activity import classify_frames
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import (
    GroupRef,
    HotLine,
    Phase,
    Slow,
    SlowStretch,
    SlowTransfer,
    Straggler,
    Why,
)
from commlens.model.collective import Collective, Frame, Stack, user_frame
from commlens.model.ops import ROOTED
from commlens.model.ranklog import RankLog
from commlens.model.spans import Span, length
from commlens.speed.device_times import find_slow_link, payload_by_place
from commlens.speed.pace import MIN_COST, SlowRanks, find_waits, timed_span

_NS: Final = 1e-9
_OF_COST: Final = 0.75  # if the host may be late by less, the device is
_SIGMAS: Final = 2.5  # by which two ranks' samples differ by chance
_SLOW_TRANSFER: Final = 1.3  # times as long as in groups that do the same


@dataclass(kw_only=True)
class StragglerCase(Case[Straggler]):
    """Ranks that make a job slow. Its line is the one to look at."""

    hot_stack: Stack  # an example of those at the line in which they spend their time
    # the collectives between which they take longer, if no line is known
    ends: tuple[Collective, Collective] | None
    pid: int  # of the first slow rank
    node: str  # on which alone the ranks were compared; empty: on all nodes


def find_straggler(
    slow: SlowRanks,
    logs: Sequence[RankLog],
    profiles: Mapping[int, Mapping[Stack, int]],
    compared: Iterable[int],
) -> StragglerCase:
    """Return where slow ranks spend their time, and what holds them back.

    Args:
        slow: the ranks.
        logs: of all ranks of a node, with the newest records and with observations.
        profiles: samples by stack of one of the slow ranks and of another, if they were taken.
        compared: the ranks that were compared; none: those of ``logs``.
    """
    others = sorted({*compared, *(log.rank for log in logs)} - set(slow.ranks))
    ours = [log for log in logs if log.rank in slow.ranks]
    why, held_back = _what_holds_back(slow, ours)
    hot_line, hot_stack, host_share = _find_hot_line(slow, profiles)
    of_device, runs_ahead = _OnDevice(), any(op.channel.runs_ahead for op in ours[0].collectives)
    if why is None and runs_ahead:
        of_device = _what_slows_devices(slow, logs, host_share)
        why = of_device.why
    stretch, ends = _find_stretch(slow, logs) if hot_line is None else (None, None)
    source = None
    if hot_line is not None and hot_line.other is not None:
        source = user_frame(hot_stack)
        why = why or classify_frames(ours[0], hot_stack).why
    elif ends is not None:
        source = ends[1].source
    cause = Straggler(
        kind="straggler",
        why=why or ("unknown" if runs_ahead and hot_line is None else "user-code"),
        root_cause=True,
        culprits=slow.ranks,
        blamed_by="lateness",
        victims=others,
        confidence="medium",
        cost=slow.cost,
        step_s=slow.step_s,
        steps=slow.steps,
        held_back=held_back,
        hot_line=hot_line,
        stretch=stretch,
        since_ns=slow.since_ns,
        since_step=slow.since_step,
        slower=slow.slower,
        by_rounds=slow.by_rounds,
        transfer=of_device.transfer,
        work_ratio=of_device.work_ratio,
    )
    node = _only_node(slow, logs, others)
    return StragglerCase(
        cause, None, source, hot_stack=hot_stack, ends=ends, pid=ours[0].pid, node=node
    )


class _OnDevice(NamedTuple):
    """Why the devices of slow ranks are late; nothing if their host makes them late."""

    why: Why | None = None
    transfer: SlowTransfer | None = None
    work_ratio: float | None = None


def _what_slows_devices(slow: SlowRanks, logs: Sequence[RankLog], host_share: float) -> _OnDevice:
    """Return why devices are late, as far as it shows.

    Args:
        slow: the ranks.
        logs: of all ranks of a node, with durations on their devices.
        host_share: the share of the time by which their host may be later than another rank's.
    """
    begin, end = timed_span(logs)
    window = max(begin, slow.since_ns), end
    # of the time of the slow ranks that others do not need, most must be explained
    least_s = slow.cost * slow.step_s / 2
    ratio = _work_ratio(slow.ranks, logs, window)
    if ratio > 1 + slow.cost / 2:
        return _OnDevice("uneven-work", work_ratio=round(ratio, 2))
    link = find_slow_link(logs, window, slow.ranks)
    if link is not None:
        extra_s = link.lost_ns * _NS / max(1.0, (window[1] - window[0]) * _NS / slow.step_s)
        if extra_s > least_s and link.ratio > _SLOW_TRANSFER:
            ref = GroupRef(link.group.name, link.group.description, list(link.group.all_ranks))
            return _OnDevice(
                "slow-link", SlowTransfer(ref, link.kind.op, round(link.ratio, 2), extra_s)
            )
    if (slow.slower or 1.0) <= 1 + slow.cost / 2 and _are_stage(slow.ranks, logs):
        return _OnDevice("uneven-work")
    return _OnDevice("slow-device" if host_share < _OF_COST * slow.cost else None)


def _are_stage(ranks: Sequence[int], logs: Sequence[RankLog]) -> bool:
    """Return whether ranks are a whole stage of pipelines, so that no other rank does their work:
    all ranks that share a group with one of them, and no pipeline, are among them.
    """
    pipelines = _pipelines(logs)
    keys = {op.channel.key for log in logs for op in log.collectives}
    groups = {key[2] for key in keys}
    alike = [
        group
        for group in groups
        if len({pipelines.get(rank) for rank in group}) == len(group) and {*group} & {*ranks}
    ]
    return {*ranks} <= pipelines.keys() and all({*group} <= {*ranks} for group in alike)


def _pipelines(logs: Sequence[RankLog]) -> dict[int, frozenset[int]]:
    """Return the ranks that messages link, by each of them."""
    pipelines: dict[int, frozenset[int]] = {}
    for log in logs:
        peers = {op.peer for op in log.collectives if op.channel.runs_ahead and op.peer is not None}
        for peer in peers - pipelines.get(log.rank, frozenset()):
            whole = frozenset({log.rank, peer}).union(
                *(pipelines.get(rank, ()) for rank in (log.rank, peer))
            )
            pipelines.update(dict.fromkeys(whole, whole))
    return pipelines


def _work_ratio(ranks: Sequence[int], logs: Sequence[RankLog], window: Span) -> float:
    """Return how much more the ranks contribute to collectives than the others, at the lines where
    all ranks issue them and where the difference is largest; 1 if there is no such line.
    """
    by_rank = {log.rank: payload_by_place(log, window) for log in logs}
    ours = [each for rank, each in by_rank.items() if rank in ranks]
    others = [each for rank, each in by_rank.items() if rank not in ranks]
    places = set.intersection(*(set(each) for each in by_rank.values()))
    return max(
        (
            min(each[place] for each in ours) / max(each[place] for each in others)
            for place in places
            if max(each[place] for each in others)
        ),
        default=1.0,
    )


def _only_node(slow: SlowRanks, logs: Sequence[RankLog], others: Sequence[int]) -> str:
    """Return the node whose ranks alone were compared; empty if those of all nodes were."""
    part = logs[0].world_size > len({*others, *slow.ranks})
    return logs[0].host if part and len({log.host for log in logs}) == 1 else ""


def _what_holds_back(
    slow: SlowRanks, logs: Sequence[RankLog]
) -> tuple[Why, float] | tuple[None, None]:
    """Return why slow ranks could not run, and for which share of the time; None if their
    processes do not show it.
    """
    throttled = min(log.observation.throttled_fraction or 0.0 for log in logs)
    if throttled > MIN_COST:
        return "throttled", throttled
    pressure = min(log.observation.memory_pressure or 0.0 for log in logs)
    if pressure > 100 * MIN_COST:
        return "memory-pressure", pressure / 100
    if slow.no_cpu > slow.cost / 2 and slow.no_cpu > 2 * slow.no_cpu_others:
        return "no-cpu", slow.no_cpu
    return None, None


def _phase_of(after: Collective, before: Collective) -> Phase | None:
    """Return the part of a training step, as far as the collectives at both ends tell it."""
    if before.step > after.step:
        return "before-the-backward"
    if _is_in(before, "torch/optim/"):
        return "optimizer"
    if _is_in(before, "torch/autograd/", "torch/_tensor.py"):
        return "backward" if _is_in(after, "torch/autograd/") else "backward-or-before"
    return None


def _find_stretch(
    slow: SlowRanks, logs: Sequence[RankLog]
) -> tuple[SlowStretch, tuple[Collective, Collective]] | tuple[None, None]:
    """Return the stretch between two collectives in which the slow ranks spend most time more than
    the others, if it makes up for a good part of the time lost, and the collectives.
    """
    spent, examples = _time_between_collectives(logs, slow.ranks)
    others = [own for rank, own in spent.items() if rank not in slow.ranks]
    ends = [
        (log.collectives[0], log.collectives[-1])
        for log in logs
        if log.rank in slow.ranks and log.collectives
    ]
    steps = [
        last.step - first.step
        or length([(first.announced_ns, last.announced_ns)]) * _NS / slow.step_s
        for first, last in ends
    ]
    if not (examples and others and steps):
        return None, None
    ours = [own for rank, own in spent.items() if rank in slow.ranks]
    extra = {each: _median(ours, each) - _median(others, each) for each in examples}
    worst = max(extra, key=lambda each: extra[each])
    extra_s = extra[worst] / max(1, *steps)
    if extra_s <= slow.cost * slow.step_s / 4:
        return None, None
    after, before = examples[worst]
    phase = _phase_of(after, before)
    stretch = SlowStretch(after.op, source_of(after), before.op, source_of(before), phase, extra_s)
    return stretch, examples[worst]


def _time_between_collectives(
    logs: Sequence[RankLog], ranks: Sequence[int]
) -> tuple[dict[int, dict[_Ends, float]], dict[_Ends, tuple[Collective, Collective]]]:
    """Return how long each rank was in each stretch, in s, and an example of each stretch of the
    ``ranks``.
    """
    spent: dict[int, dict[_Ends, float]] = {}
    examples: dict[_Ends, tuple[Collective, Collective]] = {}
    for rank, waits in find_waits(logs).items():
        own = spent.setdefault(rank, defaultdict(float))
        until = 0
        for after, before in pairwise(waits):
            until = max(until, after.end_ns)
            ends = (after.op.op, after.op.call_lines, before.op.op, before.op.call_lines)
            own[ends] += max(0, before.begin_ns - until) * _NS
            if rank in ranks:
                examples.setdefault(ends, (after.op, before.op))
    return spent, examples


def _median(ranks: Sequence[Mapping[_Ends, float]], ends: _Ends) -> float:
    return median(own.get(ends, 0.0) for own in ranks)


_Lines = tuple[tuple[str, int], ...]
_Ends = tuple[str, _Lines, str, _Lines]
"""The ops at both ends of a stretch, each with its call lines."""


def _is_in(op: Collective, *parts: str) -> bool:
    return any(part in frame.file for frame in op.stack for part in parts)


def _find_hot_line(
    slow: SlowRanks, profiles: Mapping[int, Mapping[Stack, int]]
) -> tuple[HotLine | None, Stack, float]:
    """Return the line in which the first slow rank spends most time more than another rank, and an
    example of its stacks there; none if the other rank spends nearly as much time there. Also
    return the share of the time by which it may be at one line for longer; 1 if that is not known.
    """
    ours = next((profiles[rank] for rank in slow.ranks if profiles.get(rank)), {})
    other = next((rank for rank in profiles if rank not in slow.ranks and profiles[rank]), None)
    shares, theirs = _by_line(ours), _by_line(profiles[other]) if other is not None else {}
    frame = max(shares, key=lambda each: shares[each] - theirs.get(each, 0.0), default=None)
    if frame is None:
        return None, (), 1.0
    hot = HotLine(frame.where, shares[frame], other, theirs.get(frame, 0.0))
    more = hot.share - hot.share_other
    by_chance = _SIGMAS * sqrt(2 * hot.share * (1 - hot.share) / sum(ours.values()))
    # alone, it may be as it should be
    if other is not None and more <= max(slow.cost / 3, by_chance):
        return None, (), more + by_chance
    example = max((each for each in ours if user_frame(each) == frame), key=lambda each: ours[each])
    return hot, example, 1.0


def _by_line(profile: Mapping[Stack, int]) -> dict[Frame, float]:
    total = sum(profile.values())
    shares: dict[Frame, float] = defaultdict(float)
    for stack, samples in profile.items():
        if (frame := user_frame(stack)) is not None:
            shares[frame] += samples / total
    return shares


# collectives to which a straggler comes last; on a busy machine, each rank does so now and then
_MIN_TIMES = 8
_MIN_SHARE = 0.1  # share of the time for which the others wait for a straggler
_MIN_RATIO = 3.0  # how much longer they wait for it than for any other rank
# Among few collectives, one of several equally fast ranks is often late more often than the others:
# chance gives some rank so many late arrivals in one job of 100 at most.
_MAX_CHANCE = 0.01


def find_slow(context: Context) -> None:
    """Find the rank that makes the others wait for a good part of the time, if there is one."""
    # It needs numpy, which the diagnosis of black boxes does without.
    from commlens.diagnosis.align.lateness import lateness

    job = context.job
    ranked = lateness(job)
    if not ranked:
        return
    worst = ranked[0]
    second = next((one.lost_ns for one in ranked if one.rank != worst.rank), 0)
    span = _span_ns(job)
    if (
        worst.times < _MIN_TIMES
        or worst.lost_ns < _MIN_SHARE * span
        or worst.lost_ns < _MIN_RATIO * second
        or exp(-worst.unlikely) * len(worst.key[2]) > _MAX_CHANCE
    ):
        return
    op = job.views[worst.rank].tracks[worst.key].ops[worst.worst]
    if op.op in ROOTED:
        return
    cause = Slow(
        kind="straggler",
        why="user-code",
        root_cause=True,
        culprits=[worst.rank],
        blamed_by="lateness",
        victims=sorted(set(worst.key[2]) - {worst.rank}),
        confidence="medium",
        times=worst.times,
        of=worst.of,
        lost_s=worst.lost_ns / 1e9,
        span_s=span / 1e9,
    )
    context.cases.append(Case(cause, op, op.source))


def _span_ns(job: JobIndex) -> int:
    """Return the longest time that the records of a rank cover."""
    spans = [0]
    for view in job.views.values():
        created = view.dump.created_ns if view.dump is not None else None
        if created is not None and (created > 0).any():
            spans.append(int(created.max() - created[created > 0].min()))
    return max(spans)
