"""The time of collectives: from the record, from a profiler's trace, and what is not known."""

from __future__ import annotations

import msgspec
import pytest
from traces import US, Recorder, on, render, training

import commlens
from commlens.model.trace import Phase, TraceData
from commlens.text import short_duration
from commlens.traces.times import Time, step_times, time_of, times

MS = 1000 * US


def one(op: str = "all_reduce", size: int = 1000, **more: object) -> TraceData:
    recorder = Recorder()
    recorder.issue(op, "tp", Phase.FORWARD, "MLP", size, 3, **more)
    return recorder.finish()


# --- from the record


@pytest.mark.parametrize(
    ("more", "time"),
    [
        # issued in 20 us, other work for 30 us, waited for 40 us
        ({}, Time(90 * US, 60 * US)),
        ({"wait_began_ns": 0, "wait_ended_ns": 0, "asynchronous": False}, Time(20 * US, 20 * US)),
        # nobody was seen waiting: when it ended is not known
        ({"wait_began_ns": 0, "wait_ended_ns": 0, "asynchronous": True}, None),
        ({"count": 5}, None),
        # saved while the rank waited
        ({"wait_ended_ns": 0, "asynchronous": False}, None),
        # another thread waited before the call had returned
        ({"wait_began_ns": 1010 * US, "wait_ended_ns": 1015 * US}, Time(20 * US, 20 * US)),
        ({"wait_began_ns": 1010 * US, "wait_ended_ns": 1050 * US}, Time(50 * US, 50 * US)),
    ],
)
def test_the_time_of_a_collective_on_a_cpu(more, time):
    data = one(**more)
    assert time_of(data, data.events[0]) == time


@pytest.mark.parametrize("backend", ["nccl", "xccl", "fake", "ucc"])
def test_the_hosts_times_say_nothing_elsewhere(backend):
    data = on(training(), backend)
    found = times(data)
    assert (
        found is not None
        and found.timed == 0
        and found.answer.startswith("The time of the collectives is unknown:")
    )
    assert "unknown" in commlens.Trace(data).to_summary().times.answer


def test_a_preview_has_no_times():
    assert times(msgspec.structs.replace(training(), preview=True)) is None


def test_the_backends_own_time_counts_on_an_accelerator():
    data = on(one(duration_ns=70 * US), "nccl")
    assert time_of(data, data.events[0]) == Time(70 * US, None)
    assert times(data).source == "backend"


def test_steps_are_timed_between_their_first_collectives():
    data = training(steps=4)
    steps = step_times(data)
    assert len(steps) == 2  # the first sets up, and nothing follows the last
    assert {step for step, _ in steps} == {16 * 100 * US}
    assert {waited for _, waited in steps} == {16 * 60 * US}


def test_the_setup_before_the_first_forward_is_no_part_of_the_first_step():
    ((step, waited),) = step_times(training(setup=5))
    assert (step, waited) == (16 * 100 * US, 16 * 60 * US)


@pytest.mark.parametrize(
    ("op", "size", "factor"),
    [
        ("all_reduce", 4000, 6 / 4),
        ("all_gather", 4000, 3 / 4),
        ("reduce_scatter", 4000, 3 / 4),
        ("broadcast", 4000, 1),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(op, size, factor):
    (row,) = times(one(op, size, wait_began_ns=1020 * US, wait_ended_ns=1090 * US)).bandwidth
    assert row.algorithm == pytest.approx(size / 90e-6)
    assert row.bus == pytest.approx(size / 90e-6 * factor)
    assert not row.at_least


def test_a_bandwidth_is_a_lower_bound_if_other_work_ran_before_the_wait():
    assert times(one()).bandwidth[0].at_least


def test_modules_and_phases_add_up():
    summary = commlens.Trace(training()).to_summary(network="h100-ib")
    assert summary.times.time_ns == 32 * 90 * US and summary.times.waited_ns == 32 * 60 * US
    for rows in (summary.by_phase, summary.by_op, summary.by_mesh_dim):
        assert sum(row.time_ns for row in rows) == 32 * 90 * US
    root = summary.by_module[0]
    assert root.time_ns == root.calls * 90 * US
    assert all(row.estimated_ns for row in summary.times.bandwidth)


def test_the_terminal_shows_them():
    text = " ".join(render(commlens.Trace(training(steps=4)).to_summary()).split())
    assert "A step took 1.6 ms" in text and "of which the rank waited 960 us (60%)" in text
    assert "slowest" in text and "bandwidth" in text and ">=" in text
    assert "unknown" not in text


def concurrent() -> TraceData:
    """Two collectives in flight at once: waited for one after the other, as a program does, or both
    in one wait, as DDP does.
    """
    recorder = Recorder()
    for _ in range(2):
        recorder.issue("all_reduce", "tp", Phase.BACKWARD, "MLP", 1000, 3)
    first, second = recorder.data.events
    first.wait_began_ns = first.wait_ended_ns = second.wait_ended_ns
    return recorder.finish()


def test_the_parts_of_the_time_add_up():
    found = times(concurrent())
    # The first: 190 us, of which 20 us in its call and 20 + 40 us in the other one's; the other: 90
    # us.
    assert (found.time_ns, found.waited_ns) == (280 * US, 80 * US)
    assert (found.overlapped_ns, found.elsewhere_ns, found.unsplit_ns) == (140 * US, 60 * US, 0)
    assert (
        "waited for 80 us of it (29%), and other work ran during 140 us. During 60 us, it waited"
        " for other" in found.answer
    )
    for data in (
        training(),
        on(training(), "nccl"),
        on(one(duration_ns=70 * US), "nccl"),
        one(),
        one(duration_ns=70 * US),
    ):
        found = times(data)
        parts = (found.waited_ns, found.overlapped_ns, found.elsewhere_ns, found.unsplit_ns)
        assert sum(parts) == found.time_ns and min(parts) >= 0


def test_threads_that_wait_at_the_same_time_make_a_step_wait_once():
    data = training(steps=4)
    # as those of a checkpoint saved meanwhile
    beside = [msgspec.structs.replace(event, thread=1) for event in data.events]
    both = msgspec.structs.replace(
        data, events=sorted([*data.events, *beside], key=lambda event: event.started_ns)
    )
    assert step_times(both) == step_times(data)


def test_unknown_waiting_is_not_told_as_none():
    data = training(steps=4)
    for event in data.events:
        event.duration_ns = 70 * US
    found = times(on(data, "nccl"))
    assert found.time_ns == found.unsplit_ns and found.step_ns and found.waited_per_step_ns is None
    assert "waited" not in found.answer


def test_sums_in_which_some_calls_are_unknown_are_lower_bounds():
    data = training()
    for event in data.events[::2]:
        event.wait_began_ns = event.wait_ended_ns = 0
        event.asynchronous = True
    summary = commlens.Trace(data).to_summary()
    row = next(row for row in summary.by_phase if 0 < row.timed < row.calls)
    assert row.timed == row.wait_known
    text = render(summary)
    assert (
        f">={short_duration(row.time_ns)}" in text and "for some of the calls it is unknown" in text
    )


# --- a profiler's trace
