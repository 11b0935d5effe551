"""Traces of healthy jobs on real ranks: nothing false is said, a preview sees the same, and bytes
are as arithmetic says.

All jobs run in one launch, ``traced_jobs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chosen import WHOLE
from zygote_client import Zygote

torch = pytest.importorskip("torch")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
    pytest.skip("pipelining and FSDP2 on a CPU need a later torch", allow_module_level=True)

import bytes_table  # noqa: E402
import torch.distributed as dist  # noqa: E402
import traced_jobs  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import commlens  # noqa: E402
from commlens.model.trace import TraceData, TraceEvent  # noqa: E402
from commlens.traces.ranks import RankTraces  # noqa: E402

HERE = Path(__file__).parent
pytestmark = [pytest.mark.timeout(360), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def jobs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankTraces]:
    """The traces of every job."""
    out = tmp_path_factory.mktemp("jobs")
    printed = zygote.run(str(HERE / "traced_jobs.py"), str(out), folder=out, timeout_s=340)
    assert printed.rstrip().endswith("[0, 0, 0, 0]"), printed[-6000:]
    return {
        name: RankTraces(map(commlens.Trace.load, sorted((out / name).glob("*.json"))))
        for name in traced_jobs.JOBS
    }


# From torch 2.15 on, stages reduce what they learn of each other before the first microbatch.
PIPELINE = (
    "All 4 ranks issued the same collectives."
    if torch.__version__ >= (2, 15)
    else "All 4 ranks issued only sends and receives."
)


@pytest.mark.parametrize(
    ("job", "answer"),
    [
        ("tensor_parallel", "All 4 ranks issued the same collectives."),
        ("sharded_tensor_parallel", "All 4 ranks issued the same collectives."),
        ("gpipe", PIPELINE),
        ("1f1b", PIPELINE),
        ("interleaved", PIPELINE),
        (
            "three_dimensions",
            (
                "All 4 ranks issued the same collectives as the others of their pipeline stage"
                " (0-1; 2-3)."
            ),
        ),
    ],
)
def test_nothing_false_is_said_of_a_healthy_job(jobs, job, answer):
    assert jobs[job].answer() == answer
    assert jobs[job].differences() == []
    assert [trace.coverage.unclassified for trace in jobs[job]] == [0] * 4


def passes(trace: commlens.Trace, op: str) -> list[tuple[str, str | None, int | None]]:
    return sorted(
        (e.phase.value, e.site, e.microbatch)
        for e in trace.events
        if e.op == op and e.microbatch is not None
    )


@pytest.mark.parametrize(("job", "microbatches"), [("gpipe", 4), ("1f1b", 4)])
def test_messages_of_a_pipeline_have_their_pass_and_microbatch(jobs, job, microbatches):
    for rank, trace in jobs[job].by_rank.items():
        forward, backward = (
            [(phase, "Blocks", number) for number in range(microbatches)]
            for phase in ("forward", "backward")
        )
        assert passes(trace, "send") == (backward if rank > 0 else []) + (
            forward if rank < 3 else []
        )
        assert passes(trace, "recv") == (backward if rank < 3 else []) + (
            forward if rank > 0 else []
        )
        # the shapes, sent once before
        others = [event for event in trace.events if event.microbatch is None]
        assert {event.phase.value for event in others} <= {"outside"}


def test_microbatches_of_several_stages_on_a_rank(jobs):
    for rank, trace in jobs["interleaved"].by_rank.items():
        first = [
            ("forward", site, number) for site in ("Blocks", "Blocks#2") for number in range(4)
        ]
        sent = [each for each in passes(trace, "send") if each[0] == "forward"]
        assert sent == (first if rank < 3 else first[:4])


def test_what_stages_communicate_has_its_pass_and_microbatch(jobs):
    for rank, trace in jobs["three_dimensions"].by_rank.items():
        scattered = trace.filter(op="reduce_scatter").events
        assert [event.phase.value for event in scattered] == ["backward"] * len(scattered), rank
        reduced = trace.filter(op="all_reduce", phase=["forward", "backward"], mesh_dim="tp")
        assert set(reduced.counts(by="microbatch")) == {0, 1, None}  # None: to learn the shapes
        assert trace.filter(phase="outside").counts().keys() <= {
            "send",
            "recv",
            "scatter",
            "broadcast",
            "all_reduce",
        }


def _content(data: TraceData, event: TraceEvent) -> tuple[Any, ...]:
    group, owner = data.group_of(event), event.owner
    return (
        event.op,
        event.api,
        event.phase,
        group.mesh_dim,
        group.ranks,
        event.site,
        event.dtype,
        event.input_bytes,
        event.output_bytes,
        event.wire_bytes,
        event.peer,
        event.root,
        owner and owner.name,
        event.call,
        event.cause and event.cause.before,
    )


@pytest.mark.parametrize("job", ["sharded_tensor_parallel", "three_dimensions"])
def test_a_preview_of_every_rank_is_what_gloo_issued(jobs, job):
    for rank, real in jobs[job].by_rank.items():
        if rank not in (0, 3) and not WHOLE:
            continue
        preview = commlens.preview(
            lambda: traced_jobs.run(traced_jobs.JOBS[job]), world_size=4, rank=rank
        )
        assert [_content(preview.data, event) for event in preview.events] == [
            _content(real.data, event) for event in real.events
        ]


# --- bytes


def check_bytes(trace: commlens.Trace, rank: int, size: int, *, fake: bool) -> None:
    expected = [case for case in bytes_table.cases(rank, size) if fake or not case.fake_only]
    assert len(trace.events) == len(expected)
    for event, case in zip(trace.events, expected, strict=True):
        found = (event.op, event.input_bytes, event.output_bytes, event.wire_bytes)
        item = bytes_table.ITEM
        assert found == (
            case.op,
            case.sent * item,
            case.received * item,
            int(case.wire * item + 1e-6),
        ), f"{case.name} on rank {rank}"


def test_bytes_on_gloo(jobs):
    for rank, trace in jobs["every_op"].by_rank.items():
        check_bytes(trace, rank, 4, fake=False)


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    rank, size = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield rank, size
    dist.destroy_process_group()


@pytest.mark.parametrize("fake_world", [(0, 4), (2, 4), (7, 8), (0, 1)], indirect=True)
def test_bytes_on_the_fake_backend(fake_world):
    rank, size = fake_world
    if size == 1:
        with commlens.trace() as trace:
            dist.all_reduce(torch.ones(4))
        assert trace.wire_bytes == 0
        return
    with commlens.trace() as trace:
        bytes_table.run(rank, size, fake=True)
    check_bytes(trace, rank, size, fake=True)
