"""A profiler's trace joined with ours: the time that each collective itself took.

Both know when the host issued a collective, in Unix time: a ``c10d`` call of the profile that
encloses an issue of ours is the same one. The kernels of a collective on an accelerator are those
that were launched during that call. gloo's threads run its collectives in the order of issue, so
the n-th of them is the n-th that was issued.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import msgspec

from commlens.errors import CommandError
from commlens.formats.kineto import Kernel, KinetoTrace, Span, read_kineto
from commlens.model.grouping import grouped
from commlens.model.spans import covered, union
from commlens.model.trace import TraceData, TraceEvent
from commlens.text import count, number
from commlens.traces.times import CPU_BACKENDS, blocked_spans

_TOLERANCE_NS = 200_000  # between the two clocks, which are read one after the other
Measured = tuple[int, int | None]
"""Duration and overlapped part of a collective, in ns; None if no wait for it was seen."""
_NEIGHBOURS = 8  # calls of other threads that may have begun in between
_NOT_QUEUED = ("send", "recv", "monitored_barrier")  # gloo does these without its threads


def join(data: TraceData, path: Path) -> tuple[TraceData, str]:
    """Return the trace with the times of a profile, and a sentence on how much of it was found
    there.

    Raises:
        FormatError: the file is not a profiler's trace.
        CommandError: it is another rank's, or it has no collective of this trace.
    """
    profile = read_kineto(path)
    if profile.rank is not None and profile.rank != data.rank:
        raise CommandError(
            f"{path} is the profile of rank {profile.rank}, and the trace is of rank {data.rank}:"
            " give one of the same rank."
        )
    if not profile.unix_times or not data.started_unix_ns:
        raise CommandError(
            f"{path} cannot be joined: its times, or the trace's, are not Unix times (torch 2.4 and"
            " later write them)."
        )
    issues = _issues(data, profile.issues)
    if not issues:
        raise CommandError(
            f"{path} has none of the trace's collectives: they were issued at other times."
        )
    durations = _kernels(issues, profile.kernels) | _on_cpu(data, issues, profile)
    events = list(data.events)
    for index, (duration, overlapped) in durations.items():
        events[index] = msgspec.structs.replace(
            events[index], duration_ns=duration, overlapped_ns=overlapped
        )
    text = (
        f"{number(len(durations))} of {count(len(data.events), 'collective')} have their time from"
        f" {path.name}"
    )
    if len(issues) > len(durations):
        text += (
            f"; {number(len(issues) - len(durations))} more are in it without a time of their own"
        )
    return msgspec.structs.replace(data, events=events), f"{text}."


def _issues(data: TraceData, issues: Sequence[Span]) -> dict[int, Span]:
    """Return the call of the profile that issued each collective, by index of the event."""
    starts = [issue.start for issue in issues]
    found: dict[int, Span] = {}
    taken: set[int] = set()
    for index, event in enumerate(data.events):
        if not event.returned_ns:
            continue
        began = data.started_unix_ns + event.started_ns
        returned = data.started_unix_ns + event.returned_ns
        first = bisect.bisect_left(starts, began - _TOLERANCE_NS) - _NEIGHBOURS
        after = bisect.bisect_right(starts, began + _TOLERANCE_NS)
        same = [
            at
            for at in range(max(0, first), after)
            if at not in taken
            and issues[at].end + _TOLERANCE_NS >= returned
            and _same_op(event, issues[at])
        ]
        if not same:
            continue
        # the innermost call that encloses ours, else the one that began nearest to it
        enclosing = [at for at in same if issues[at].start <= began and returned <= issues[at].end]
        nearest = min(same, key=lambda at: abs(issues[at].start - began))
        best = max(enclosing, default=nearest)
        found[index] = issues[best]
        taken.add(best)
    return found


def _same_op(event: TraceEvent, issue: Span) -> bool:
    plain = issue.name.strip("_").replace("_", "")
    return event.op.replace("_", "") in plain or plain.startswith(event.op.replace("_", "")[:6])


def _kernels(issues: dict[int, Span], kernels: Sequence[Kernel]) -> dict[int, Measured]:
    """Return duration and overlapped part of the collectives whose kernels were launched in their
    call.
    """
    launched = sorted(
        (kernel for kernel in kernels if kernel.communicates and kernel.launched is not None),
        key=lambda k: k.launched or 0,
    )
    moments = [kernel.launched or 0 for kernel in launched]
    busy = grouped(
        (kernel.device, (kernel.start, kernel.end)) for kernel in kernels if not kernel.communicates
    )
    merged = {device: union(spans) for device, spans in busy.items()}
    found: dict[int, Measured] = {}
    for index, issue in issues.items():
        own = launched[
            bisect.bisect_left(moments, issue.start) : bisect.bisect_right(moments, issue.end)
        ]
        if own:
            overlapped = sum(
                covered(merged.get(kernel.device, []), kernel.start, kernel.end) for kernel in own
            )
            found[index] = (sum(kernel.end - kernel.start for kernel in own), overlapped)
    return found


def _on_cpu(data: TraceData, issues: dict[int, Span], profile: KinetoTrace) -> dict[int, Measured]:
    """Return duration and overlapped part of the collectives that gloo ran, if the profile has as
    many of them as were issued in it.
    """
    queued = [issue for issue in profile.issues if not issue.name.startswith(_NOT_QUEUED)]
    runs = [run for run in profile.on_cpu if not run.name.startswith(_NOT_QUEUED)]
    if len(queued) != len(runs):
        return {}
    run_of = {id(issue): run for issue, run in zip(queued, runs, strict=True)}
    found: dict[int, Measured] = {}
    blocked = blocked_spans(data)
    for index, issue in issues.items():
        run, event = run_of.get(id(issue)), data.events[index]
        if run is None or data.group_of(event).backend not in CPU_BACKENDS or run.end <= run.start:
            continue
        began, ended = run.start - data.started_unix_ns, run.end - data.started_unix_ns
        overlapped = ended - began - covered(blocked.get(event.thread, []), began, ended)
        found[index] = (ended - began, overlapped if event.wait_ended_ns else None)
    return found
