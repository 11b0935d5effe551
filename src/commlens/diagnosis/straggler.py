"""Ranks that make a running job slow, in words: where they spend their time, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Final, NamedTuple

from commlens.diagnosis.index.activity import classify_frames
from commlens.model.cause import Why
from commlens.model.collective import Collective, Frame, Stack, user_frame
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Finding, Verdict
from commlens.speed.pace import MIN_COST, Slow, find_waits
from commlens.text import capital, count, duration, frame_phrase, ranks_and_verb, ranks_phrase

_NS: Final = 1e-9


class Stretch(NamedTuple):
    """What a slow rank does for longer than the others: the time between two collectives."""

    after: Collective
    before: Collective
    extra_s: float  # per step

    @property
    def words(self) -> str:
        """Between which lines."""
        after, before = frame_phrase(self.after.source), frame_phrase(self.before.source)
        between = f"between {self.after.op} in {after} and {self.before.op} in {before}"
        return (
            between
            if (after, self.after.op) != (before, self.before.op)
            else f"between one {self.after.op} in {after} and the next"
        )

    @property
    def phase(self) -> str:
        """The part of a training step, as far as the collectives at both ends tell it."""
        if self.before.step > self.after.step:
            return "after an optimizer step: in data loading or the forward pass"
        if _is_in(self.before, "torch/optim/"):
            return "in the optimizer step"
        if _is_in(self.before, "torch/autograd/", "torch/_tensor.py"):
            return (
                "in the backward pass, or before it in the forward pass"
                if not _is_in(self.after, "torch/autograd/")
                else "in the backward pass"
            )
        return ""


def find_stretch(logs: Sequence[RankLog], ranks: Sequence[int]) -> Stretch | None:
    """Return the stretch between two collectives in which the ``ranks`` spend most time more than
    the others.
    """
    own: dict[int, dict[_Ends, float]] = {}  # by rank
    examples: dict[_Ends, tuple[Collective, Collective]] = {}
    for rank, waits in find_waits(logs).items():
        spent = own.setdefault(rank, defaultdict(float))
        until = 0
        for after, before in pairwise(waits):
            until = max(until, after.end_ns)
            ends = (after.op.op, after.op.call_lines, before.op.op, before.op.call_lines)
            spent[ends] += max(0, before.begin_ns - until) * _NS
            if rank in ranks:
                examples.setdefault(ends, (after.op, before.op))
    slow = [own[rank] for rank in own if rank in ranks]
    others = [own[rank] for rank in own if rank not in ranks]
    steps = [
        log.collectives[-1].step - log.collectives[0].step
        for log in logs
        if log.rank in ranks and log.collectives
    ]
    if not others or not steps:
        return None
    extra = {
        ends: (
            median(each.get(ends, 0.0) for each in slow)
            - median(each.get(ends, 0.0) for each in others)
        )
        for ends in examples
    }
    worst = max(extra, key=lambda ends: extra[ends], default=None)
    return (
        Stretch(*examples[worst], extra[worst] / max(1, *steps))
        if worst is not None and extra[worst] > 0
        else None
    )


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


def straggler_verdict(
    slow: Slow,
    logs: Sequence[RankLog],
    profiles: Mapping[int, Mapping[Stack, int]] = MappingProxyType({}),
    *,
    compared: Iterable[int] = (),
) -> Verdict:
    """Return the verdict on ranks that make a job slow, with the place where they spend their time.

    Args:
        slow: the ranks.
        logs: of all ranks of a node, with the newest records and with observations.
        profiles: samples by stack of one of the slow ranks and of another, if they were taken.
        compared: the ranks that were compared; none: those of ``logs``.
    """
    others = sorted({*compared, *(log.rank for log in logs)} - set(slow.ranks))
    who, lost_s = ranks_phrase(slow.ranks), slow.cost * slow.step_s
    stretch = find_stretch(logs, slow.ranks)
    hotspot = find_hotspot(profiles, slow.ranks)
    ours = [log for log in logs if log.rank in slow.ranks]
    why, cause, next_step = _cause(slow, ours)
    they_wait = (
        f"{ranks_and_verb(others, 'waits', 'wait')} {duration(lost_s / _NS)} longer than {who}"
    )
    evidence = [
        f"In each step of {duration(slow.step_s / _NS)}, {they_wait} ({count(slow.steps, 'step')}"
        " seen)"
    ]
    source = None
    if hotspot is not None and hotspot.other is None:
        # which may be as it should be
        evidence.append(
            f"{who} spends {hotspot.share:.0%} of the time in {frame_phrase(hotspot.frame)}"
        )
    elif hotspot is not None and hotspot.share - hotspot.share_other > slow.cost / 3:
        source = hotspot.frame
        evidence.append(
            f"{who} spends {hotspot.share:.0%} of the time in {frame_phrase(source)}, rank"
            f" {hotspot.other} {hotspot.share_other:.0%}"
        )
        kind = classify_frames(ours[0], hotspot.stack).why
        why = why if cause or kind is None else kind
        next_step = next_step or f"look at {source.function} ({source.where}) on {who}"
    elif stretch is not None and stretch.extra_s > lost_s / 4:
        source = stretch.before.source
        phase = f" ({stretch.phase})" if stretch.phase else ""
        evidence.append(
            f"{who} takes {duration(stretch.extra_s / _NS)} longer in each step"
            f" {stretch.words}{phase}"
        )
    if cause:
        evidence.append(f"{who} {cause}")
    if not next_step:
        place = f" before {frame_phrase(source)}" if source is not None else ""
        next_step = (
            f"profile {who}{place} (`py-spy record --duration 10 --pid {ours[0].pid}`), and compare"
            f" it with rank {others[0]}"
        )
    some = (
        logs[0].host
        if len({log.host for log in logs}) == 1 and logs[0].world_size > len({*others, *slow.ranks})
        else ""
    )
    finding = Finding(
        kind="straggler",
        why=why,
        root_cause=True,
        culprits=slow.ranks,
        victims=others,
        confidence="medium",
        summary=(
            f"{ranks_and_verb(slow.ranks, 'makes', 'make')} the job slow: all"
            f" others{f' on {some}' if some else ''} wait for {slow.cost:.0%} of the time"
        ),
        explanation=" ".join(f"{capital(each)}." for each in evidence),
        next_step=next_step,
        would_raise_confidence="That others wait for a rank shows that it is later, not why.",
        source=source.where if source is not None else None,
        source_file=f"{source.file}:{source.line}" if source is not None else None,
        function=source.function if source is not None else None,
    )
    return Verdict.from_findings(
        [finding],
        looked_at=f"{count(len(others) + len(slow.ranks), 'rank')}, {count(slow.steps, 'step')}",
    )


def _cause(slow: Slow, logs: Sequence[RankLog]) -> tuple[Why, str, str]:
    """Return why a rank is slow, in a clause, and what to do, as far as its process shows it."""
    throttled = [log.observation.throttled_fraction or 0.0 for log in logs]
    if min(throttled) > MIN_COST:
        text = f"was held back by its cgroup's CPU limit for {min(throttled):.0%} of the time"
        return (
            "throttled",
            text,
            "raise the CPU limit of its container, or start fewer threads there",
        )
    pressure = [log.observation.memory_pressure or 0.0 for log in logs]
    if min(pressure) > 100 * MIN_COST:
        return (
            "memory-pressure",
            f"stood still for lack of memory for {min(pressure):.0f}% of the time",
            "give it more memory, or use less",
        )
    if slow.no_cpu > slow.cost / 2 and slow.no_cpu > 2 * slow.no_cpu_others:
        text = f"was ready to run but had no CPU for {slow.no_cpu:.0%} of the time"
        return (
            "no-cpu",
            text,
            "find out what else runs on its cores (top, taskset), and start fewer threads",
        )
    return "user-code", "", ""
