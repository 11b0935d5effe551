"""The time of collectives: from the record, from a profiler's trace, and what is not known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from traces import US, Recorder, training

import commlens
from commlens.errors import CommandError, FormatError
from commlens.model.trace import Phase, TraceData
from commlens.reports.trace_terminal import render
from commlens.text import short_duration
from commlens.traces.profile import join
from commlens.traces.times import Time, step_times, time_of, times

MS = 1000 * US


def on(data: TraceData, backend: str) -> TraceData:
    return msgspec.structs.replace(
        data, groups=[msgspec.structs.replace(group, backend=backend) for group in data.groups]
    )


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


def profile(events: list[dict[str, Any]], data: TraceData, **more: Any) -> bytes:
    """Events whose times are microseconds since the trace began."""
    return json.dumps(
        {
            "schemaVersion": 1,
            "baseTimeNanoseconds": data.started_unix_ns,
            "traceEvents": events,
            **more,
        }
    ).encode()


def on_a_gpu(data: TraceData) -> list[dict[str, Any]]:
    """What the profiler writes for each collective: the call, the launch in it, and a kernel of 40
    us with a GEMM beside half of it.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "ts": 0.0, "args": {"name": "python"}}
    ]
    calls = {
        "all_reduce": "allreduce_",
        "all_gather": "_allgather_base_",
        "reduce_scatter": "_reduce_scatter_base_",
    }
    for number, event in enumerate(data.events):
        at = event.started_ns / US
        events += [
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": f"c10d::{calls[event.op]}",
                "pid": 1,
                "tid": 1,
                "ts": at - 3,
                "dur": 26.0,
                "args": {},
            },
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernelExC",
                "ts": at + 5,
                "dur": 4.0,
                "args": {"correlation": number},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "ts": at + 10,
                "dur": 40.0,
                "args": {"correlation": number, "device": 0, "stream": 20},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "ampere_sgemm_128x64_nn",
                "ts": at + 30,
                "dur": 60.0,
                "args": {"correlation": 1000 + number, "device": 0, "stream": 7},
            },
        ]
    return events


@pytest.fixture
def on_gpus(tmp_path: Path) -> tuple[TraceData, Path]:
    data = on(training(), "nccl")
    path = tmp_path / "profile.json.gz"
    path.write_bytes(
        gzip.compress(
            profile(
                on_a_gpu(data),
                data,
                distributedInfo={"backend": "nccl", "rank": 0, "world_size": 8},
            )
        )
    )
    return data, path


def test_kernels_are_joined_by_the_call_that_launched_them(on_gpus):
    data, note = join(*on_gpus)
    assert note == "32 of 32 collectives have their time from profile.json.gz."
    assert {(event.duration_ns, event.overlapped_ns) for event in data.events} == {
        (40 * US, 20 * US)
    }
    found = times(data)
    assert (
        found.source == "profile"
        and found.time_ns == 32 * 40 * US
        and found.waited_ns == found.overlapped_ns == 32 * 20 * US
    )
    assert not any(row.at_least for row in found.bandwidth)


def test_a_profile_of_a_part_times_that_part(on_gpus, tmp_path):
    data, _ = on_gpus
    path = tmp_path / "part.json"
    path.write_bytes(profile(on_a_gpu(data)[: 1 + 4 * 10], data))
    data, note = join(data, path)
    assert note.startswith("10 of 32 collectives")
    assert times(data).answer.startswith("10 of 32 collectives, whose time is known, took 400 us")


def test_gloos_runs_are_joined_in_their_order(tmp_path):
    data = training()
    calls = [event for event in on_a_gpu(data) if event.get("cat") == "cpu_op"]
    runs = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "gloo:all_reduce",
            "tid": 9,
            "ts": event.started_ns / US + 15,
            "dur": 50.0,
            "args": {},
        }
        for event in data.events
    ]
    path = tmp_path / "p.json"
    path.write_bytes(profile(calls + runs, data))
    joined, _ = join(data, path)
    # It ran from 15 to 65 us; the thread was blocked until 20 and from 50 on.
    assert {(event.duration_ns, event.overlapped_ns) for event in joined.events} == {
        (50 * US, 30 * US)
    }
    path.write_bytes(profile(calls + runs[1:], data))
    _, note = join(data, path)
    assert (
        note
        == "0 of 32 collectives have their time from p.json; 32 more are in it without a time of"
        " their own."
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"distributedInfo": {"rank": 3}}, "is the profile of rank 3"),
        ({"baseTimeNanoseconds": 0}, "are not Unix times"),
        ({"traceEvents": []}, "has none of the trace's collectives"),
        ({"baseTimeNanoseconds": 1}, "has none of the trace's collectives"),
    ],
)
def test_profiles_that_do_not_belong_to_the_trace(on_gpus, change, why):
    data, path = on_gpus
    content = json.loads(gzip.decompress(path.read_bytes())) | change
    path.write_bytes(json.dumps(content).encode())
    with pytest.raises(CommandError, match=why):
        join(data, path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\x1f\x8b\x00", b'{"traceEvents": 3}', b"\xff\xfe", b'{"a": 1}']
)
def test_what_is_no_profile(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"is not a trace of torch.profiler"):
        join(training(), path)


def test_view_takes_a_profile(on_gpus, tmp_path, capsys):
    from commlens import commands

    data, path = on_gpus
    commlens.Trace(data).save(tmp_path / "x.json")
    assert commands.main(["view", str(tmp_path / "x.json")]) == 0
    assert "is unknown: on nccl the host's times say nothing" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (
        commands.main(
            ["view", str(tmp_path / "x.json"), "--profile", str(path), "--network", "h100-ib"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "The 32 collectives took 1.3 ms" in out and "estimate" in out
    assert "32 of 32 collectives have their time" in err
    assert (
        commands.main(["view", str(tmp_path / "x.json"), "--profile", str(tmp_path / "none.json")])
        == 2
    )
