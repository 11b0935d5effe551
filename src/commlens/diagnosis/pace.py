"""How fast a running job is, and which ranks make it slow.

Ranks that are fast enough wait in collectives; a slow rank does not wait, because the others are there already. So the rank that
waits least, while all others wait, costs the job as much time as the others wait at least. This needs no clock in common: each rank's
waits are measured on its own clock. On an accelerator the host does not wait; there the collective's time on the device counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Final, NamedTuple

from commlens.diagnosis.activity import classify_frames
from commlens.model.collective import ChannelKey, Collective, Frame, LearnedHow, Stack, user_frame
from commlens.model.ranklog import RankLog
from commlens.model.spans import Span, union
from commlens.model.verdict import Finding, Verdict, Why
from commlens.text import capital, count, duration, frame_phrase, group_label, ranks_and_verb, ranks_phrase

MIN_COST: Final = 0.1  # of the time
MIN_STEPS: Final = 50
MIN_S: Final = 20.0
MIN_SAMPLES: Final = 5
AGREEING: Final = 0.8  # of the samples
_NS: Final = 1e-9
_MIN_COLLECTIVES: Final = 10  # of a rank, in a sample


class Pace(NamedTuple):
    """One sample of a running job."""

    window_s: float  # seconds that the records cover
    steps: int  # optimizer steps completed since the last sample
    waited_s: dict[int, float]  # rank: time in collectives
    step_s: float = 0.0  # average time of these steps
    no_cpu_s: Mapping[int, float] = MappingProxyType({})  # rank: time in which it was ready to run and had no CPU, if known


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


def measure(logs: Iterable[RankLog], since_ns: int = 0, until_ns: int = 0) -> Pace | None:
    """Return how long each rank was in collectives, as far as the records of all ranks reach back.

    Args:
        logs: of a running job, read at about the same time.
        since_ns: leave out what was before (Unix ns).
        until_ns: leave out what was after; 0: nothing.

    Returns:
        None if there are fewer than two ranks or too few records, or the time in collectives is not known: on an accelerator without
        the setting timing.
    """
    logs = list(logs)
    begin = max((log.collectives[0].announced_ns if log.collectives else log.captured_ns for log in logs), default=0)
    begin = max(begin, since_ns)
    end = min([log.captured_ns for log in logs] + [until_ns] * bool(until_ns), default=0)
    if len(logs) < 2 or end <= begin:
        return None
    waited: dict[int, float] = {}
    steps = []
    waits = find_waits(logs)
    for log in logs:
        inside = [op for op in log.collectives if begin <= op.announced_ns < end]
        on_device = [op for op in inside if op.channel.device != "cpu"]
        if len(inside) < _MIN_COLLECTIVES or any(op.duration_ns is None and not op.in_flight for op in on_device):
            return None
        intervals = ((max(wait.begin_ns, begin), min(wait.end_ns, end)) for wait in waits[log.rank])
        total = sum(last - first for first, last in union(interval for interval in intervals if interval[0] < interval[1]))
        waited[log.rank] = (total + sum(op.duration_ns or 0 for op in on_device)) * _NS
        steps.append(inside[-1].step - inside[0].step)
    window_s = (end - begin) * _NS
    return Pace(window_s, min(steps), waited, window_s / max(1, *steps))


def measure_traffic(logs: Sequence[RankLog]) -> list[Traffic]:
    """Return what the ranks do in each group, as far as the records of all ranks reach back, by the time in collectives."""
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
                intervals[group_label(wait.op.channel.group)].append((max(begin, wait.begin_ns), min(end, wait.end_ns)))
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
            name, calls[name] / window_s / len(ranks[name]), payload[name] / window_s / len(ranks[name]),
            waited[name] * _NS / window_s / len(ranks[name]),
        )
        for name in calls
    ]  # fmt: skip
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

    DDP waits for its collectives in C++ at the end of the backward pass, which the tap does not see. There the last collective of a step
    counts, and the wait lasts until all ranks of the host have issued it: clocks of several hosts differ.
    """
    found: dict[int, list[Wait]] = {}
    hosts: dict[int, str] = {}
    unseen: dict[tuple[ChannelKey, str, int], dict[int, Collective]] = defaultdict(dict)  # channel, host, step: each rank's last one
    for log in logs:
        waits = found[log.rank] = []
        hosts[log.rank] = log.host
        for op in log.collectives:
            if op.channel.device != "cpu" or not op.announced_ns:
                continue
            still = log.captured_ns if op.in_flight else 0
            waits.append(Wait(op.announced_ns, op.returned_ns or still or op.announced_ns, op))
            if op.wait_began_ns:
                waits.append(Wait(op.wait_began_ns, op.wait_ended_ns or still or op.wait_began_ns, op))
            elif not op.is_point_to_point and op.learned_how is not LearnedHow.RETURN:
                unseen[op.channel.key, log.host, op.step][log.rank] = op
    for (key, host, _), by_rank in unseen.items():
        numbers = {op.sequence_number for op in by_rank.values()}
        if len(numbers) == 1 and len(by_rank) == sum(hosts.get(rank) == host for rank in key[2]):
            last = max(op.announced_ns for op in by_rank.values())
            for rank, op in by_rank.items():
                found[rank].append(Wait(op.announced_ns, last, op))
    return {rank: sorted(waits, key=lambda wait: wait[:2]) for rank, waits in found.items()}


def find_slow_ranks(paces: Sequence[Pace], min_cost: float = MIN_COST) -> Slow | None:
    """Return the ranks that make a job slow; None if there are none, or the samples are too few or do not agree.

    Args:
        paces: samples, oldest first.
        min_cost: the share of the time that all other ranks must wait more than they do.
    """
    if not paces or len({frozenset(pace.waited_s) for pace in paces}) > 1:
        return None
    if not _suffices(paces):
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
        if min(pace.waited_s[rank] for rank in others) - max(pace.waited_s[rank] for rank in ranks) > min_cost / 2 * pace.window_s
    ]
    if len(agreeing) < AGREEING * len(paces):
        return None
    step_s = median(pace.step_s for pace in paces)
    return Slow(sorted(ranks), cost_s / window_s, steps, step_s, _without_cpu(paces, ranks), _without_cpu(paces, others))


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
    known = [pace.no_cpu_s[rank] / pace.window_s for pace in paces for rank in ranks if rank in pace.no_cpu_s]
    return sum(known) / len(known) if known else 0.0


def find_slow_in_records(logs: Sequence[RankLog]) -> Slow | None:
    """Return the ranks that made a job slow for as long as the records of all ranks reach back; None if there are none."""
    begin = max((log.collectives[0].announced_ns for log in logs if log.collectives), default=0)
    end = min((log.captured_ns for log in logs), default=0)
    number = MIN_SAMPLES + 1
    edges = [begin + (end - begin) * part // number for part in range(number + 1)]
    paces = [measure(logs, first, last) for first, last in pairwise(edges)]
    return find_slow_ranks([pace for pace in paces if pace is not None])


def recent(paces: Sequence[Pace]) -> list[Pace]:
    """Return the newest samples that suffice to find slow ranks; all if they do not."""
    return next((list(paces[-taken:]) for taken in range(MIN_SAMPLES, len(paces)) if _suffices(paces[-taken:])), list(paces))


def _suffices(paces: Sequence[Pace]) -> bool:
    steps, total_s = sum(pace.steps for pace in paces), sum(pace.steps * pace.step_s for pace in paces)
    return len(paces) >= MIN_SAMPLES and total_s >= MIN_S and steps >= MIN_STEPS


# --- where the time goes


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
        return between if (after, self.after.op) != (before, self.before.op) else f"between one {self.after.op} in {after} and the next"

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
    """Return the stretch between two collectives in which the ``ranks`` spend most time more than the others."""
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
    steps = [log.collectives[-1].step - log.collectives[0].step for log in logs if log.rank in ranks and log.collectives]
    if not others or not steps:
        return None
    extra = {ends: median(each.get(ends, 0.0) for each in slow) - median(each.get(ends, 0.0) for each in others) for ends in examples}
    worst = max(extra, key=lambda ends: extra[ends], default=None)
    return Stretch(*examples[worst], extra[worst] / max(1, *steps)) if worst is not None and extra[worst] > 0 else None


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
    other: int  # another rank
    share_other: float


def find_hotspot(profiles: Mapping[int, Mapping[Stack, int]], ranks: Sequence[int]) -> Hotspot | None:
    """Return the line in which the slow ranks' first spends most time more than another rank.

    Args:
        profiles: samples by stack, for each rank that was profiled.
        ranks: the slow ranks.
    """
    slow = next((profiles[rank] for rank in ranks if profiles.get(rank)), None)
    other = next((rank for rank in profiles if rank not in ranks and profiles[rank]), None)
    if slow is None or other is None:
        return None
    ours, theirs = _by_line(slow), _by_line(profiles[other])
    frame = max(ours, key=lambda each: ours[each] - theirs.get(each, 0.0), default=None)
    if frame is None:
        return None
    stack = max((stack for stack in slow if user_frame(stack) == frame), key=lambda stack: slow[stack])
    return Hotspot(stack, frame, ours[frame], other, theirs.get(frame, 0.0))


def _by_line(profile: Mapping[Stack, int]) -> dict[Frame, float]:
    total = sum(profile.values())
    shares: dict[Frame, float] = defaultdict(float)
    for stack, samples in profile.items():
        if (frame := user_frame(stack)) is not None:
            shares[frame] += samples / total
    return shares


# --- in words


def straggler_verdict(slow: Slow, logs: Sequence[RankLog], profiles: Mapping[int, Mapping[Stack, int]] = MappingProxyType({})) -> Verdict:
    """Return the verdict on ranks that make a job slow, with the place where they spend their time.

    Args:
        slow: the ranks.
        logs: of all ranks, with the newest records and with observations.
        profiles: samples by stack of one of the slow ranks and of another, if they were taken.
    """
    others = sorted({log.rank for log in logs} - set(slow.ranks))
    who, lost_s = ranks_phrase(slow.ranks), slow.cost * slow.step_s
    stretch = find_stretch(logs, slow.ranks)
    hotspot = find_hotspot(profiles, slow.ranks)
    ours = [log for log in logs if log.rank in slow.ranks]
    why, cause, next_step = _cause(slow, ours)
    they_wait = f"{ranks_and_verb(others, 'waits', 'wait')} {duration(lost_s / _NS)} longer than {who}"
    evidence = [f"In each step of {duration(slow.step_s / _NS)}, {they_wait} ({count(slow.steps, 'step')} seen)"]
    source = None
    if hotspot is not None and hotspot.share - hotspot.share_other > slow.cost / 3:
        source = hotspot.frame
        evidence.append(
            f"{who} spends {hotspot.share:.0%} of the time in {frame_phrase(source)}, rank {hotspot.other} {hotspot.share_other:.0%}"
        )
        kind, _ = classify_frames(ours[0], hotspot.stack)
        why = why if cause or kind is None else kind
        next_step = next_step or f"look at {source.function} ({source.where}) on {who}"
    elif stretch is not None and stretch.extra_s > lost_s / 4:
        source = stretch.before.source
        phase = f" ({stretch.phase})" if stretch.phase else ""
        evidence.append(f"{who} takes {duration(stretch.extra_s / _NS)} longer in each step {stretch.words}{phase}")
    if cause:
        evidence.append(f"{who} {cause}")
    if not next_step:
        place = f" before {frame_phrase(source)}" if source is not None else ""
        next_step = f"profile {who}{place} (`py-spy record --duration 10 --pid {ours[0].pid}`), and compare it with rank {others[0]}"
    some = logs[0].host if len({log.host for log in logs}) == 1 and logs[0].world_size > len(logs) else ""  # other nodes have ranks, too
    finding = Finding(
        kind="straggler", why=why, root_cause=True, culprits=slow.ranks, victims=others, confidence="medium",
        summary=f"{ranks_and_verb(slow.ranks, 'makes', 'make')} the job slow: all others{f' on {some}' if some else ''} wait for "
        f"{slow.cost:.0%} of the time",
        explanation=" ".join(f"{capital(each)}." for each in evidence), next_step=next_step,
        source=source.where if source is not None else None,
        source_file=f"{source.file}:{source.line}" if source is not None else None,
        function=source.function if source is not None else None,
    )  # fmt: skip
    return Verdict.from_findings([finding], looked_at=f"{count(len(logs), 'rank')}, {count(slow.steps, 'step')}")


def _cause(slow: Slow, logs: Sequence[RankLog]) -> tuple[Why, str, str]:
    """Return why a rank is slow, in a clause, and what to do, as far as its process shows it."""
    throttled = [log.observation.throttled_fraction or 0.0 for log in logs]
    if min(throttled) > MIN_COST:
        text = f"was held back by its cgroup's CPU limit for {min(throttled):.0%} of the time"
        return "throttled", text, "raise the CPU limit of its container, or start fewer threads there"
    pressure = [log.observation.memory_pressure or 0.0 for log in logs]
    if min(pressure) > 100 * MIN_COST:
        return "memory-pressure", f"stood still for lack of memory for {min(pressure):.0f}% of the time", "give it more memory, or use less"
    if slow.no_cpu > slow.cost / 2 and slow.no_cpu > 2 * slow.no_cpu_others:
        text = f"was ready to run but had no CPU for {slow.no_cpu:.0%} of the time"
        return "no-cpu", text, "find out what else runs on its cores (top, taskset), and start fewer threads"
    return "user-code", "", ""
