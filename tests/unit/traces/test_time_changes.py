"""Whether two runs of a program took different times."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from traces import training

import commlens
from commlens.model.trace import TraceData
from commlens.traces.diff_ranks import compare_ranks
from commlens.traces.ranks import RankTraces


def slower(
    data: TraceData, factor: float, jitter: Callable[[int], float] = lambda step: 1.0
) -> TraceData:
    """A trace whose steps take longer by a factor, each by another jitter."""
    moments: dict[int, int] = {}
    now = 0
    per_step = 16
    for number, event in enumerate(list(data.events)):
        moments[number] = now
        now += int(100_000 * factor * jitter(number // per_step))
        shift = moments[number] - event.started_ns
        data.events[number] = msgspec.structs.replace(
            event,
            started_ns=moments[number] + 1,
            returned_ns=event.returned_ns + shift,
            wait_began_ns=event.wait_began_ns + shift,
            wait_ended_ns=event.wait_ended_ns + shift,
        )
    return data


def uneven(step: int) -> float:
    return 1 + (step * 7 % 5) / 10


def test_time_that_moved_is_told_and_is_no_change():
    before, after = slower(training(steps=9), 1.0, uneven), slower(training(steps=9), 1.6, uneven)
    comparison = commlens.Trace(before).compare(commlens.Trace(after))
    assert not comparison
    assert [change.subject for change in comparison.times] == ["a step"]
    assert (
        comparison.time
        == "Time moved: a step takes 3.1 ms (2.6 ms to 3.6 ms) instead of 1.9 ms (1.6 ms to 2.2"
        " ms). These are medians of 7 steps, with their 95% intervals."
    )


def test_no_claim_within_the_noise():
    before, after = slower(training(steps=9), 1.0, uneven), slower(training(steps=9), 1.2, uneven)
    comparison = commlens.Trace(before).compare(commlens.Trace(after))
    assert comparison.times == [] and comparison.time.startswith(
        "Time did not move by more than the noise: a step takes 2.3 ms"
    )


def test_few_steps_decide_nothing():
    comparison = commlens.Trace(slower(training(steps=5), 1.0)).compare(
        commlens.Trace(slower(training(steps=5), 9.0))
    )
    assert comparison.times == []
    assert (
        comparison.time == "Times are not compared: 3 and 3 whole steps are too few, 4 are needed."
    )


def test_times_of_several_ranks():
    runs = [
        RankTraces(
            commlens.Trace(slower(training(rank, steps=9), factor, uneven)) for rank in range(4)
        )
        for factor in (1.0, 1.6)
    ]
    comparison = compare_ranks(*runs)
    assert not comparison and comparison.time.startswith("Time moved: a step takes 3.1 ms")


def test_previews_and_accelerators_have_no_times_to_compare():
    preview = msgspec.structs.replace(training(steps=9), preview=True)
    assert commlens.Trace(preview).compare(commlens.Trace(preview)).time == ""
