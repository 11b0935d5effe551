"""Ranks that make a running job slow: where they spend their time, and what holds them back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from commlens.diagnosis.causes.context import source_of
from commlens.diagnosis.index.activity import classify_frames
from commlens.model.cause import HotLine, Phase, SlowStretch, Straggler, Why
from commlens.model.collective import Collective, Frame, Stack, user_frame
from commlens.model.ranklog import RankLog
from commlens.speed.pace import MIN_COST, Slow, find_waits

_NS: Final = 1e-9


class Stretch(NamedTuple):
    """What a slow rank does for longer than the others: the time between two collectives."""

    after: Collective
    before: Collective
    extra_s: float  # per step


@dataclass
class FoundStraggler:
    """Ranks that make a job slow, and the evidence."""

    cause: Straggler
    hotspot: Hotspot | None  # in which they spend their time
    stretch: Stretch | None  # if no line is known
    source: Frame | None  # the line to look at
    pid: int  # of the first slow rank
    node: str  # on which alone the ranks were compared; empty: on all nodes


def find_straggler(
    slow: Slow,
    logs: Sequence[RankLog],
    profiles: Mapping[int, Mapping[Stack, int]],
    compared: Iterable[int],
) -> FoundStraggler:
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
    hotspot = _clear_hotspot(slow, profiles)
    stretch = _large_stretch(slow, logs) if hotspot is None else None
    source = None
    if hotspot is not None and hotspot.other is not None:
        source = hotspot.frame
        why = why or classify_frames(ours[0], hotspot.stack).why
    elif stretch is not None:
        source = stretch.before.source
    cause = Straggler(
        kind="straggler",
        why=why or "user-code",
        root_cause=True,
        culprits=slow.ranks,
        blamed_by="lateness",
        victims=others,
        confidence="medium",
        cost=slow.cost,
        step_s=slow.step_s,
        steps=slow.steps,
        held_back=held_back,
        hot_line=_as_data(hotspot) if hotspot is not None else None,
        stretch=_stretch_as_data(stretch) if stretch is not None else None,
    )
    return FoundStraggler(
        cause,
        hotspot,
        stretch,
        source,
        ours[0].pid,
        _only_node(slow, logs, others),
    )


def _only_node(slow: Slow, logs: Sequence[RankLog], others: Sequence[int]) -> str:
    """Return the node whose ranks alone were compared; empty if those of all nodes were."""
    part = logs[0].world_size > len({*others, *slow.ranks})
    return logs[0].host if part and len({log.host for log in logs}) == 1 else ""


def _clear_hotspot(slow: Slow, profiles: Mapping[int, Mapping[Stack, int]]) -> Hotspot | None:
    """Return the slow ranks' hotspot, unless another rank spends nearly as much time there."""
    hotspot = find_hotspot(profiles, slow.ranks)
    if hotspot is None or hotspot.other is None:
        return hotspot  # alone, it may be as it should be
    return hotspot if hotspot.share - hotspot.share_other > slow.cost / 3 else None


def _large_stretch(slow: Slow, logs: Sequence[RankLog]) -> Stretch | None:
    """Return the slow ranks' stretch, if it makes up for a good part of the time lost."""
    stretch = find_stretch(logs, slow.ranks)
    lost_s = slow.cost * slow.step_s
    return stretch if stretch is not None and stretch.extra_s > lost_s / 4 else None


def _what_holds_back(slow: Slow, logs: Sequence[RankLog]) -> tuple[Why, float] | tuple[None, None]:
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


def _as_data(hotspot: Hotspot) -> HotLine:
    return HotLine(hotspot.frame.where, hotspot.share, hotspot.other, hotspot.share_other)


def _stretch_as_data(stretch: Stretch) -> SlowStretch:
    after, before = stretch.after, stretch.before
    return SlowStretch(
        after.op,
        source_of(after),
        before.op,
        source_of(before),
        phase_of(stretch),
        stretch.extra_s,
    )


def phase_of(stretch: Stretch) -> Phase | None:
    """Return the part of a training step, as far as the collectives at both ends tell it."""
    if stretch.before.step > stretch.after.step:
        return "before-the-backward"
    if _is_in(stretch.before, "torch/optim/"):
        return "optimizer"
    if _is_in(stretch.before, "torch/autograd/", "torch/_tensor.py"):
        return "backward" if _is_in(stretch.after, "torch/autograd/") else "backward-or-before"
    return None


def find_stretch(logs: Sequence[RankLog], ranks: Sequence[int]) -> Stretch | None:
    """Return the stretch between two collectives in which the ``ranks`` spend most time more than
    the others.
    """
    spent, examples = _time_between_collectives(logs, ranks)
    others = [own for rank, own in spent.items() if rank not in ranks]
    steps = [
        log.collectives[-1].step - log.collectives[0].step
        for log in logs
        if log.rank in ranks and log.collectives
    ]
    if not others or not steps:
        return None
    slow = [own for rank, own in spent.items() if rank in ranks]
    extra = {ends: _median(slow, ends) - _median(others, ends) for ends in examples}
    worst = max(extra, key=lambda ends: extra[ends], default=None)
    if worst is None or extra[worst] <= 0:
        return None
    return Stretch(*examples[worst], extra[worst] / max(1, *steps))


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


class Hotspot(NamedTuple):
    """A line in which a slow rank spends more time than another one."""

    stack: Stack  # an example, innermost frame first
    frame: Frame  # its innermost user frame
    share: float  # of the slow rank's time
    other: int | None  # another rank; None: there is none on its node
    share_other: float


def find_hotspot(
    profiles: Mapping[int, Mapping[Stack, int]], ranks: Sequence[int]
) -> Hotspot | None:
    """Return the line in which the slow ranks' first spends most time more than another rank.

    Args:
        profiles: samples by stack, for each rank that was profiled.
        ranks: the slow ranks.
    """
    slow = next((profiles[rank] for rank in ranks if profiles.get(rank)), None)
    other = next((rank for rank in profiles if rank not in ranks and profiles[rank]), None)
    if slow is None:
        return None
    ours, theirs = _by_line(slow), _by_line(profiles[other]) if other is not None else {}
    frame = max(ours, key=lambda each: ours[each] - theirs.get(each, 0.0), default=None)
    if frame is None:
        return None
    stack = max(
        (stack for stack in slow if user_frame(stack) == frame), key=lambda stack: slow[stack]
    )
    return Hotspot(stack, frame, ours[frame], other, theirs.get(frame, 0.0))


def _by_line(profile: Mapping[Stack, int]) -> dict[Frame, float]:
    total = sum(profile.values())
    shares: dict[Frame, float] = defaultdict(float)
    for stack, samples in profile.items():
        if (frame := user_frame(stack)) is not None:
            shares[frame] += samples / total
    return shares
