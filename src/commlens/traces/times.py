"""The time of collectives: in all, waited for, overlapped, and the bandwidth achieved.

A collective on a CPU's backend lasts from its issue to the end of the wait for it, and the issuing thread is blocked in the call and in the
wait; in between, other work runs. On an accelerator, the host's times say nothing about a collective: its time is the one that the backend
or a profiler measured, else it is unknown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from commlens.model.network import Network
from commlens.model.ops import BARRIERS
from commlens.model.trace import TraceData, TraceEvent
from commlens.model.trace_times import Bandwidth, SlowCall, Times
from commlens.text import count, number, short_duration
from commlens.traces import wording
from commlens.traces.network import collective_seconds

CPU_BACKENDS: Final = ("gloo", "mpi")
MAX_SLOWEST: Final = 5
MAX_BANDWIDTHS: Final = 8
_OVERLAPS_FROM = 0.1  # a collective is called overlapped if other work ran for this part of its time


class Time(NamedTuple):
    """The time of one collective, in ns."""

    total: int
    waited: int | None  # None if unknown

    @property
    def overlapped(self) -> int:
        """The part in which other work ran; on a CPU at most this, because the collective may have ended before the wait began."""
        return max(0, self.total - self.waited) if self.waited is not None else 0


def time_of(data: TraceData, event: TraceEvent) -> Time | None:
    """Return the time of a collective; None if it is unknown, as in a preview, a summarised event or on an accelerator."""
    if data.preview or event.count > 1:
        return None
    on_cpu = data.group_of(event).backend in CPU_BACKENDS
    blocked = event.returned_ns - event.started_ns + event.wait_ended_ns - event.wait_began_ns
    if event.duration_ns:
        if event.overlapped_ns is not None:
            return Time(event.duration_ns, event.duration_ns - event.overlapped_ns)
        return Time(event.duration_ns, min(blocked, event.duration_ns) if on_cpu and event.wait_ended_ns else None)
    if not on_cpu or not event.returned_ns:
        return None
    if event.wait_ended_ns:
        ended = max(event.wait_ended_ns, event.returned_ns)
        return Time(ended - event.started_ns, min(blocked, ended - event.started_ns))
    return Time(blocked, blocked) if event.asynchronous is False else None


def source_of(data: TraceData) -> str:
    """Return where the times of a trace come from: ``record``, ``backend`` or ``profile``; empty if none is known."""
    if any(event.overlapped_ns is not None for event in data.events):
        return "profile"
    if any(event.duration_ns for event in data.events):
        return "backend"
    return "record" if any(time_of(data, event) for event in data.events) else ""


def times(data: TraceData, network: Network | None = None) -> Times | None:
    """Return what is known about the time of a trace's collectives; None for a preview and without collectives."""
    if data.preview or not data.events:
        return None
    known = [(event, time) for event in data.events if (time := time_of(data, event)) is not None]
    untimed = sum(event.count for event in data.events) - len(known)
    steps = step_times(data)
    waits = [waited for _, waited in steps]
    found = Times(
        answer="",
        source=source_of(data),
        timed=len(known),
        untimed=untimed,
        time_ns=sum(time.total for _, time in known),
        waited_ns=sum(time.waited or 0 for _, time in known),
        overlapped_ns=sum(time.overlapped for _, time in known),
        steps=len(steps),
        step_ns=round(statistics.median(step for step, _ in steps)) if steps else None,
        step_spread_ns=_quartiles([step for step, _ in steps]) if len(steps) > 1 else None,
        waited_per_step_ns=round(statistics.median(waits)) if waits else None,
        slowest=_slowest(data, known),
        bandwidth=_bandwidths(data, known, network),
    )
    found.answer = _answer(data, found)
    return found


def step_times(data: TraceData) -> list[tuple[int, int]]:
    """Return the time of each whole step and the part that the rank waited in collectives, in ns.

    A step lasts from its first collective to the next step's first one. The first step is left out where there are others: it sets up.
    """
    first = _first_moments(data)
    waited: dict[int, int] = {}
    for event in data.events:
        time = time_of(data, event)
        waited[event.step] = waited.get(event.step, 0) + ((time.waited or 0) if time is not None else 0)
    return [(first[step + 1] - first[step], waited[step]) for step in whole_steps(data)]


def whole_steps(data: TraceData) -> list[int]:
    """Return the steps whose time is known: those that are followed by another one, without the first if there are others."""
    first = _first_moments(data)
    whole = [step for step in sorted(first) if step + 1 in first]
    return whole[1:] if len(whole) > 1 else whole


def _first_moments(data: TraceData) -> dict[int, int]:
    """Return when each step issued its first collective."""
    first: dict[int, int] = {}
    if not data.preview:
        for event in data.events:
            if event.started_ns and event.count == 1:
                first[event.step] = min(first.get(event.step, event.started_ns), event.started_ns)
    return first


def _quartiles(values: Sequence[int]) -> tuple[int, int]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def _answer(data: TraceData, found: Times) -> str:
    if not found.timed:
        return f"The time of the collectives is unknown: {_why_unknown(data)}"
    text = f"{_of(found)} took {short_duration(found.time_ns)}"
    if found.waited_ns or found.overlapped_ns:
        text += f"; the rank waited for {short_duration(found.waited_ns)} of it ({found.waited_ns / max(1, found.time_ns):.0%})"
        if found.overlapped_ns >= 0.01 * found.time_ns:
            text += ", and other work ran during the rest"
    if found.step_ns:
        waited = found.waited_per_step_ns or 0
        text += f". A step took {short_duration(found.step_ns)}"
        if found.step_spread_ns is not None and found.steps > 3:
            text += f" ({short_duration(found.step_spread_ns[0])} to {short_duration(found.step_spread_ns[1])})"
        text += f", of which the rank waited {short_duration(waited)} ({waited / found.step_ns:.0%}) in collectives"
    return f"{text}."


def _of(found: Times) -> str:
    if found.untimed:
        return f"{number(found.timed)} of {count(found.timed + found.untimed, 'collective')}, whose time is known,"
    return f"The {count(found.timed, 'collective')}" if found.timed > 1 else "The collective"


def _why_unknown(data: TraceData) -> str:
    backends = sorted({data.group_of(event).backend for event in data.events} - {""})
    if backends and not any(backend in CPU_BACKENDS for backend in backends):
        if backends == ["fake"]:
            return "nothing was sent on the fake backend."
        return (
            f"on {' and '.join(backends)} the host's times say nothing about it. Give --profile FILE, a trace of torch.profiler, or set "
            "TORCH_NCCL_ENABLE_TIMING=1 for the job."
        )
    return "no wait for them was seen." if any(event.returned_ns for event in data.events) else "the trace has no times."


def _slowest(data: TraceData, known: Sequence[tuple[TraceEvent, Time]]) -> list[SlowCall]:
    slowest = sorted(known, key=lambda pair: -pair[1].total)[:MAX_SLOWEST]
    return [SlowCall(_call(data, event), event.sequence, event.step, time.total, time.waited) for event, time in slowest]


def _call(data: TraceData, event: TraceEvent) -> str:
    where = wording.source_words(event.source, event.through)
    carries = wording.payload(event)
    text = f"{event.op} #{event.sequence} on {wording.label(data.group_of(event))}{f', {carries}' if carries else ''}"
    text += f": step {event.step}, {wording.place_of(event)}"
    return f"{text}, at {where}" if where else text


def _bandwidths(data: TraceData, known: Iterable[tuple[TraceEvent, Time]], network: Network | None) -> list[Bandwidth]:
    """Return the bandwidth of equal collectives, those that took the longest in all first."""
    alike: dict[tuple[str, int, int, int], list[tuple[TraceEvent, Time]]] = {}
    for event, time in known:
        if event.op not in BARRIERS and event.wire_bytes and time.total:
            data_bytes = max(event.input_bytes, event.output_bytes)
            alike.setdefault((event.op, event.group, data_bytes, event.wire_bytes), []).append((event, time))
    ordered = sorted(alike.items(), key=lambda item: -sum(time.total for _, time in item[1]))
    rows = []
    for (op, group_index, data_bytes, wire_bytes), calls in ordered[:MAX_BANDWIDTHS]:
        group = data.groups[group_index]
        median = round(statistics.median(time.total for _, time in calls))
        measured = all(event.duration_ns for event, _ in calls)
        overlapped = statistics.median(time.overlapped / time.total for _, time in calls) > _OVERLAPS_FROM
        estimated = None
        if network is not None:
            seconds = collective_seconds(op, group.ranks, wire_bytes, network, rank=data.rank, peer=calls[0][0].peer)
            estimated = round(seconds * 1e9)
        ranks, at_least = len(group.ranks), overlapped and not measured
        rates = data_bytes / median * 1e9, wire_bytes / median * 1e9
        rows.append(Bandwidth(op, wording.label(group), ranks, data_bytes, wire_bytes, len(calls), median, *rates, at_least, estimated))
    return rows
