"""A profile of torch.profiler beside a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from traces import US, on, training

import commlens
from commlens.errors import CommandError, FormatError
from commlens.formats.kineto import read_kineto
from commlens.model.trace import TraceData
from commlens.traces.profile import join
from commlens.traces.times import times


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


GZIP_WITH_DAMAGED_CONTENT = b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x07"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\x1f\x8b\x00",
        GZIP_WITH_DAMAGED_CONTENT,
        b'{"traceEvents": 3}',
        b"\xff\xfe",
        b'{"a": 1}',
    ],
)
def test_what_is_no_profile(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"is not a (whole )?trace"):
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


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "cat": "kernel", "ts": 1e306}',
        '{"ph": "X", "cat": "cpu_op", "name": "c10d::x", "ts": 0, "dur": 1e306}',
        '{"ph": "X", "cat": "cuda_runtime", "ts": 1e306, "args": {"correlation": 1}}',
        '{"ph": "X", "cat": "cuda_runtime", "ts": 0, "args": {"correlation": [1]}}',
        '{"ph": "X", "cat": "kernel", "ts": 0, "args": {"correlation": [1]}}',
        '{"ph": "X", "args": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    ],
    ids=["time", "duration", "launch", "launch's link", "kernel's link", "nested"],
)
def test_a_damaged_profile_is_reported(event: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(f'{{"traceEvents": [{event}]}}')
    with pytest.raises(FormatError, match=r"profile\.json"):
        read_kineto(path)
