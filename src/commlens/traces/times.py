"""The time of collectives: in all, waited for, overlapped, and the bandwidth achieved.

A collective on a CPU's backend lasts from its issue to the end of the wait for it, and the issuing
thread is blocked in the call and in the wait. In between, other work runs, or the thread is blocked
in another collective. On an accelerator, the host's times say nothing about a collective: its time
is the one that the backend or a profiler measured, else it is unknown.

An asynchronous all_reduce of gloo that is issued at 0 ms, whose call returns at 1 ms, and for which
the thread waits from 6 to 10 ms, took 10 ms, of which the rank waited 5 ms. If the thread computed
from 1 to 6 ms, these 5 ms are overlapped.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from commlens.model.grouping import grouped
from commlens.model.network import Network
from commlens.model.ops import BARRIERS
from commlens.model.spans import Span, covered, length, union
from commlens.model.trace import TraceData, TraceEvent
from commlens.model.trace_times import Bandwidth, SlowCall, Times
from commlens.text import count, number, short_duration
from commlens.traces import wording
from commlens.traces.network import collective_seconds

CPU_BACKENDS: Final = ("gloo", "mpi")
MAX_SLOWEST: Final = 5
MAX_BANDWIDTHS: Final = 8
# a collective is called overlapped if other work ran for this part of its time
_OVERLAPS_FROM = 0.1


class Time(NamedTuple):
    """The time of one collective, in ns."""

    total: int
    waited: int | None  # None if unknown

    @property
    def unwatched(self) -> int:
        """The part in which the rank did not wait for it. On a CPU the collective may have ended
        then, before the wait began.
        """
        return max(0, self.total - self.waited) if self.waited is not None else 0


def time_of(data: TraceData, event: TraceEvent) -> Time | None:
    """Return the time of a collective; None if it is unknown, as in a preview, a summarised event
    or on an accelerator.
    """
    if data.preview or event.count > 1:
        return None
    on_cpu = data.group_of(event).backend in CPU_BACKENDS
    in_call = event.returned_ns - event.started_ns
    in_wait = max(0, event.wait_ended_ns - max(event.wait_began_ns, event.returned_ns))
    blocked = in_call + in_wait
    if event.duration_ns:  # as a backend or a profiler measured it
        # the rank waited for no more of it than was not overlapped, nor than the thread was blocked
        bounds = (
            [event.duration_ns - event.overlapped_ns] if event.overlapped_ns is not None else []
        )
        bounds += [event.duration_ns, blocked] if on_cpu and event.wait_ended_ns else []
        return Time(event.duration_ns, min(bounds, default=None))
    was_saved_in_wait = event.wait_began_ns and not event.wait_ended_ns
    if not on_cpu or not event.returned_ns or was_saved_in_wait:
        return None
    if event.wait_ended_ns:
        return Time(max(event.wait_ended_ns, event.returned_ns) - event.started_ns, blocked)
    return Time(blocked, blocked) if event.asynchronous is False else None


def blocked_spans(data: TraceData) -> dict[int, list[Span]]:
    """Return when each thread was blocked in collectives of a CPU's backend."""
    spans = grouped(
        (event.thread, span)
        for event in data.events
        if event.returned_ns and data.group_of(event).backend in CPU_BACKENDS
        for span in _blocked(event)
    )
    return {thread: union(each) for thread, each in spans.items()}


def _blocked(event: TraceEvent) -> list[Span]:
    """Return when a thread was blocked in a collective: in its call, and in the wait for it."""
    spans = [(event.started_ns, event.returned_ns)]
    if event.wait_ended_ns:
        spans.append((event.wait_began_ns, event.wait_ended_ns))
    return spans


def _overlapped(
    known: Iterable[tuple[TraceEvent, Time]], blocked: Mapping[int, Sequence[Span]]
) -> int:
    """Return the part of the collectives' time in which other work ran: neither they nor others
    blocked the issuing thread.
    """
    total = 0
    for event, time in known:
        if time.waited is not None and event.duration_ns:
            total += time.unwatched if event.overlapped_ns is None else event.overlapped_ns
        elif time.waited is not None:
            total += time.total - covered(
                blocked.get(event.thread, ()), event.started_ns, event.started_ns + time.total
            )
    return total


def source_of(data: TraceData) -> str:
    """Return where the times of a trace come from: ``record``, ``backend`` or ``profile``; empty if
    none is known.
    """
    if any(event.overlapped_ns is not None for event in data.events):
        return "profile"
    if any(event.duration_ns for event in data.events):
        return "backend"
    return "record" if any(time_of(data, event) for event in data.events) else ""


def times(data: TraceData, network: Network | None = None) -> Times | None:
    """Return what is known about the time of a trace's collectives; None for a preview and without
    collectives.
    """
    if data.preview or not data.events:
        return None
    known = [(event, time) for event in data.events if (time := time_of(data, event)) is not None]
    untimed = sum(event.count for event in data.events) - len(known)
    found = Times(
        answer="",
        source=source_of(data),
        timed=len(known),
        untimed=untimed,
        time_ns=sum(time.total for _, time in known),
        waited_ns=sum(time.waited or 0 for _, time in known),
        overlapped_ns=_overlapped(known, blocked_spans(data)),
        unsplit_ns=sum(time.total for _, time in known if time.waited is None),
        slowest=[
            SlowCall(_call(data, event), event.sequence, event.step, time.total, time.waited)
            for event, time in sorted(known, key=lambda pair: -pair[1].total)[:MAX_SLOWEST]
        ],
        bandwidth=_bandwidths(data, known, network),
    )
    found.elsewhere_ns = max(
        0, found.time_ns - found.waited_ns - found.overlapped_ns - found.unsplit_ns
    )
    _add_steps(found, step_times(data), any(time.waited is not None for _, time in known))
    found.answer = _answer(data, found)
    return found


def _add_steps(found: Times, steps: Sequence[tuple[int, int]], waits_known: bool) -> None:
    found.steps = len(steps)
    ordered = sorted(step for step, _ in steps)
    if steps:
        found.step_ns = round(statistics.median(ordered))
    if len(steps) > 1:  # the quartiles
        found.step_spread_ns = ordered[len(steps) // 4], ordered[-1 - len(steps) // 4]
    if steps and waits_known:
        found.waited_per_step_ns = round(statistics.median(waited for _, waited in steps))


def step_times(data: TraceData) -> list[tuple[int, int]]:
    """Return the time of each whole step and the part that the rank waited in collectives, in ns.

    A step lasts from its first collective to the next step's first one. The setup before the first
    forward is left out, and so is the first step where there are others: it sets up too.
    """
    first = _first_moments(data)
    measured: dict[int, int] = {}
    # of all threads: those that wait at the same time count once
    blocked: dict[int, list[Span]] = {}
    for event in data.events:
        time = time_of(data, event)
        if time is None or time.waited is None or data.is_setup(event):
            continue
        if event.duration_ns:
            measured[event.step] = measured.get(event.step, 0) + time.waited
        else:
            blocked.setdefault(event.step, []).extend(_blocked(event))
    return [
        (
            first[step + 1] - first[step],
            measured.get(step, 0) + length(union(blocked.get(step, ()))),
        )
        for step in whole_steps(data)
    ]


def whole_steps(data: TraceData) -> list[int]:
    """Return the steps whose time is known: the steps that are followed by another step, without
    the first one if there are more.
    """
    first = _first_moments(data)
    whole = [step for step in sorted(first) if step + 1 in first]
    return whole[1:] if len(whole) > 1 else whole


def _first_moments(data: TraceData) -> dict[int, int]:
    """Return when each step issued its first collective."""
    first: dict[int, int] = {}
    if not data.preview:
        for event in data.events:
            if event.started_ns and event.count == 1 and not data.is_setup(event):
                first[event.step] = min(first.get(event.step, event.started_ns), event.started_ns)
    return first


def _answer(data: TraceData, found: Times) -> str:
    if not found.timed:
        return f"The time of the collectives is unknown: {_why_unknown(data)}"
    text = f"{_subject(found)} took {short_duration(found.time_ns)}"
    if found.waited_ns or found.overlapped_ns:
        text += _parts(found)
    if found.step_ns:
        text += f". A step took {short_duration(found.step_ns)}"
        if found.step_spread_ns is not None and found.steps > 3:
            text += (
                f" ({short_duration(found.step_spread_ns[0])} to"
                f" {short_duration(found.step_spread_ns[1])})"
            )
        waited = found.waited_per_step_ns
        if waited is not None:
            text += (
                f", of which the rank waited {short_duration(waited)}"
                f" ({waited / found.step_ns:.0%}) in collectives"
            )
    return f"{text}."


def _parts(found: Times) -> str:
    """Return how the time divides into waiting and other work. Parts below 1 % are left out."""
    least = 0.01 * found.time_ns
    text = (
        f"; the rank waited for {short_duration(found.waited_ns)} of it"
        f" ({found.waited_ns / max(1, found.time_ns):.0%})"
    )
    if found.elsewhere_ns < least and found.unsplit_ns < least:
        return text + (
            ", and other work ran during the rest" if found.overlapped_ns >= least else ""
        )
    if found.overlapped_ns >= least:
        text += f", and other work ran during {short_duration(found.overlapped_ns)}"
    if found.elsewhere_ns >= least:
        text += (
            f". During {short_duration(found.elsewhere_ns)}, it waited for other collectives in"
            " flight"
        )
    if found.unsplit_ns >= least:
        text += f". Of {short_duration(found.unsplit_ns)}, it is unknown whether the rank waited"
    return text


def _subject(found: Times) -> str:
    if found.untimed:
        return (
            f"{number(found.timed)} of {count(found.timed + found.untimed, 'collective')}, whose"
            " time is known,"
        )
    return f"The {count(found.timed, 'collective')}" if found.timed > 1 else "The collective"


def _why_unknown(data: TraceData) -> str:
    backends = sorted({data.group_of(event).backend for event in data.events} - {""})
    if backends and not any(backend in CPU_BACKENDS for backend in backends):
        if backends == ["fake"]:
            return "nothing was sent on the fake backend."
        return (
            f"on {' and '.join(backends)} the host's times say nothing about it. Give --profile"
            " FILE, a trace of torch.profiler, or set TORCH_NCCL_ENABLE_TIMING=1 for the job."
        )
    return (
        "no wait for them was seen."
        if any(event.returned_ns for event in data.events)
        else "the trace has no times."
    )


def _call(data: TraceData, event: TraceEvent) -> str:
    where = wording.source_words(event.source, event.through)
    carries = wording.payload(event)
    text = (
        f"{event.op} #{event.sequence} on"
        f" {wording.label(data.group_of(event))}{f', {carries}' if carries else ''}"
    )
    text += f": step {event.step}, {wording.place_of(event)}"
    return f"{text}, at {where}" if where else text


def _bandwidths(
    data: TraceData, known: Iterable[tuple[TraceEvent, Time]], network: Network | None
) -> list[Bandwidth]:
    """Return the bandwidth of equal collectives, those that took the longest in all first."""
    alike = grouped(
        (
            (event.op, event.group, max(event.input_bytes, event.output_bytes), event.wire_bytes),
            (event, time),
        )
        for event, time in known
        if event.op not in BARRIERS and event.wire_bytes and time.total
    )
    ordered = sorted(alike.items(), key=lambda item: -sum(time.total for _, time in item[1]))
    rows = []
    for (op, group_index, data_bytes, wire_bytes), calls in ordered[:MAX_BANDWIDTHS]:
        group = data.groups[group_index]
        median = round(statistics.median(time.total for _, time in calls))
        measured = all(event.duration_ns for event, _ in calls)
        overlapped = (
            statistics.median(time.unwatched / time.total for _, time in calls) > _OVERLAPS_FROM
        )
        estimated = None
        if network is not None:
            seconds = collective_seconds(
                op, group.ranks, wire_bytes, network, rank=data.rank, peer=calls[0][0].peer
            )
            estimated = round(seconds * 1e9)
        ranks, at_least = len(group.ranks), overlapped and not measured
        rates = data_bytes / median * 1e9, wire_bytes / median * 1e9
        rows.append(
            Bandwidth(
                op,
                wording.label(group),
                ranks,
                data_bytes,
                wire_bytes,
                len(calls),
                median,
                *rates,
                at_least,
                estimated,
            )
        )
    return rows
