"""Whether time moved between two runs, by more than the noise.

Each whole step gives one figure, the mean over the ranks. Two runs differ if the 95 % confidence
intervals of their medians do not overlap (order statistics: no assumption about the distribution)
and the medians differ by at least 5 %. Fewer than 4 steps decide nothing: with 4 and 4, chance
alone separates all figures in 3 of 100 cases.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from commlens.model.trace import TraceData
from commlens.model.trace_changes import TimeChange, TraceComparison
from commlens.text import count, joined, short_duration
from commlens.traces import wording
from commlens.traces.times import step_times, time_of, whole_steps

LEAST_STEPS: Final = 4
_LEAST_SHARE: Final = 0.05
_STEP: Final = "a step"
_WAITED: Final = "waiting in collectives"

Figures = dict[str, list[float]]
"""By subject: a figure in ns for each step."""


def add_times(
    comparison: TraceComparison, before: Sequence[TraceData], after: Sequence[TraceData]
) -> None:
    """Add to a comparison whether time moved. Each side has one trace for each rank."""
    old, new = _figures(before), _figures(after)
    steps = len(old.get(_STEP, ())), len(new.get(_STEP, ()))
    if min(steps) < 2:
        return
    if min(steps) < LEAST_STEPS:
        comparison.time = (
            f"Times are not compared: {steps[0]} and {count(steps[1], 'whole step')} are too few,"
            f" {LEAST_STEPS} are needed."
        )
        return
    changes = [
        change
        for subject in old
        if subject in new and (change := _change(subject, old[subject], new[subject])) is not None
    ]
    comparison.times = [change for change in changes if change.moved]
    step = changes[0]
    if comparison.times:
        moved = joined(_words(change) for change in comparison.times[:4])
        comparison.time = (
            f"Time moved: {moved}. These are medians of {_steps(steps)}, with their 95% intervals."
        )
    else:
        comparison.time = (
            f"Time did not move by more than the noise: {_words(step)}, medians of {_steps(steps)}"
            " with their 95% intervals."
        )


def _steps(steps: tuple[int, int]) -> str:
    return (
        count(steps[0], "step")
        if steps[0] == steps[1]
        else f"{steps[0]} and {count(steps[1], 'step')}"
    )


def _words(change: TimeChange) -> str:
    verb = "takes" if change.subject == _STEP else "takes, per step,"
    return (
        f"{change.subject} {verb} {short_duration(change.after_ns)}"
        f" ({_between(change.after_interval_ns)}) instead of {short_duration(change.before_ns)}"
        f" ({_between(change.before_interval_ns)})"
    )


def _between(interval: tuple[int, int]) -> str:
    return f"{short_duration(interval[0])} to {short_duration(interval[1])}"


def _figures(ranks: Sequence[TraceData]) -> Figures:
    """Return the figures of a run, the step first; each the mean over the ranks."""
    each = [_figures_of(data) for data in ranks]
    subjects = dict.fromkeys(subject for figures in each for subject in figures)
    means: Figures = {}
    for subject in subjects:
        known = [figures[subject] for figures in each if figures.get(subject)]
        means[subject] = [statistics.fmean(step) for step in zip(*known, strict=False)]
    return means


def _figures_of(data: TraceData) -> Figures:
    steps = step_times(data)
    if not steps:
        return {}
    whole = {step: place for place, step in enumerate(whole_steps(data))}
    figures: Figures = {_STEP: [float(step) for step, _ in steps]}
    waits = [float(waited) for _, waited in steps]
    if any(waits):
        figures[_WAITED] = waits
    for event in data.events:
        time = time_of(data, event) if event.step in whole else None
        if time is not None:
            subject = f"{event.op} on {wording.label(data.group_of(event))}"
            figures.setdefault(subject, [0.0] * len(steps))[whole[event.step]] += time.total
    return figures


def _change(subject: str, before: Sequence[float], after: Sequence[float]) -> TimeChange | None:
    old, new = statistics.median(before), statistics.median(after)
    if not old or not new:
        return None
    old_interval, new_interval = _interval(before), _interval(after)
    apart = new_interval[0] > old_interval[1] or new_interval[1] < old_interval[0]
    return TimeChange(
        subject=subject,
        before_ns=round(old),
        after_ns=round(new),
        before_interval_ns=old_interval,
        after_interval_ns=new_interval,
        moved=apart and abs(new / old - 1) >= _LEAST_SHARE,
    )


def _interval(values: Iterable[float]) -> tuple[int, int]:
    """Return the median's 95 % confidence interval; the extremes of few values."""
    ordered = sorted(values)
    at = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return round(ordered[at]), round(ordered[-1 - at])
