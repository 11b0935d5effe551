"""What a rank may do to the tensors of its collectives in flight, in a job of one rank."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from commlens.tap import tap
from commlens.tracing.in_flight.watch import BufferWatch
from commlens.tracing.preview.world import FakeWorld


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[BufferWatch]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    watching = BufferWatch()
    watching.start()
    yield watching
    watching.stop()
    dist.destroy_process_group()
    assert _get_current_dispatch_mode_stack() == []
    assert watching not in tap._subscribers


def shared() -> tuple[Any, Any]:
    tensor = torch.ones(4)
    return tensor, dist.all_reduce(tensor, async_op=True)


def gathered() -> tuple[Any, Any]:
    tensor = torch.ones(4)
    return tensor, dist.all_gather([torch.empty(4)], tensor, async_op=True)


TOUCHES: list[tuple[Callable[[], tuple[Any, Any]], Callable[[Any], Any], tuple[str, ...]]] = [
    (shared, lambda tensor: tensor + 1, ("read", "output")),
    (shared, lambda tensor: tensor[1:].zero_(), ("written", "output")),
    (shared, lambda tensor: torch.add(tensor, 1, out=tensor), ("read", "output")),
    (shared, lambda tensor: tensor.view(2, 2).t().detach(), ()),
    (shared, torch.empty_like, ()),
    (gathered, lambda tensor: tensor.add_(1), ("written", "input")),
    (gathered, lambda tensor: tensor + 1, ()),
]


@pytest.mark.parametrize(("issue", "touch", "expected"), TOUCHES)
def test_a_touch_before_the_wait(
    watch: BufferWatch, issue: Any, touch: Any, expected: tuple[str, ...]
) -> None:
    tensor, work = issue()
    touch(tensor)
    work.wait()
    tensor.add_(1)  # legal now
    assert {(found.access, found.operand) for found in watch.found} >= (
        {expected} if expected else set()
    )
    assert bool(watch.found) is bool(expected)


def poll(work: Any) -> None:
    while not work.is_completed():
        pass


@pytest.mark.parametrize(
    "end",
    [
        lambda work: work.wait(),
        poll,
        lambda work: work.get_future(),
        lambda work: dist.barrier(),
    ],
    ids=["wait", "poll", "future", "barrier"],
)
def test_what_ends_a_flight(watch: BufferWatch, end: Callable[[Any], None]) -> None:
    tensor, work = shared()
    assert _get_current_dispatch_mode_stack() != []
    end(work)
    assert _get_current_dispatch_mode_stack() == []
    tensor.add_(1)
    assert not watch.found


def test_synchronous_calls_and_those_of_torch_wake_nobody(watch: BufferWatch) -> None:
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, "x")
    assert _get_current_dispatch_mode_stack() == []
    assert watch not in tap._subscribers
    assert not watch.found


def test_two_collectives_on_one_tensor(watch: BufferWatch) -> None:
    tensor, work = shared()
    other = dist.all_reduce(tensor[:1], async_op=True)
    work.wait()
    other.wait()
    [found] = watch.found
    assert (found.what, found.op, found.access) == ("shared-in-flight", "all_reduce", "written")
    _, work = gathered()
    watch.found.clear()
    tensor, first = gathered()
    second = dist.all_gather([torch.empty(4)], tensor, async_op=True)
    for each in (work, first, second):
        each.wait()
    assert not watch.found


def test_a_slice_of_the_own_output_may_be_read(watch: BufferWatch) -> None:
    out = torch.ones(4)
    work = dist.all_gather([out[:2]], out[:2], async_op=True)
    out[:2].sum()
    work.wait()
    assert not watch.found


def test_it_keeps_no_tensor_and_no_work_alive(watch: BufferWatch) -> None:
    tensor, work = shared()
    references = weakref.ref(tensor), weakref.ref(work)
    del tensor, work
    dist.barrier()  # gloo itself holds them until it is done
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_an_error_of_ours_does_not_reach_a_synchronization(
    watch: BufferWatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, work = shared()
    next(iter(watch._flights)).channel = None
    assert watch._synchronized(lambda: "done") == "done"
    work.wait()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_flight_of_which_the_tensor_is_gone_ends(watch: BufferWatch) -> None:
    tensor, work = shared()
    poll_natively(work)
    del tensor, work
    gc.collect()
    one = torch.ones(1)
    for _ in range(1000):
        one + one
    assert not watch._flights


def poll_natively(work: Any) -> None:
    from commlens.tap.torch_patches import work_is_completed

    while not work_is_completed(work):
        pass


# --- in a preview


def previewed(program: Callable[[], None], asked: str, backend: str = "") -> list[str]:
    """Play one rank of two, and return what was found."""
    with FakeWorld(2, 0):
        watching = BufferWatch(preview=True, backend=backend)
        watching.start()
        dist.init_process_group(asked)
        program()
        watching.stop()
    return [found.what for found in watching.found]


def two_on_one_tensor() -> None:
    tensor, work = shared()
    other = dist.all_reduce(tensor, async_op=True)
    work.wait()
    other.wait()


def waits_for_the_second_only() -> None:
    tensor, work = shared()
    shared()[1].wait()
    tensor.add_(1)
    work.wait()


def synchronizes(wait: Callable[[], None]) -> Callable[[], None]:
    def program() -> None:
        tensor, work = shared()
        wait()
        tensor.add_(1)
        work.wait()

    return program


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (two_on_one_tensor, "shared-in-flight"),
        (waits_for_the_second_only, "touched-in-flight"),
        (synchronizes(lambda: torch.cuda.synchronize()), "touched-in-flight"),
        (synchronizes(lambda: torch.cuda.Stream().synchronize()), "touched-in-flight"),
    ],
    ids=["two on one tensor", "waits for the second", "device", "stream"],
)
def test_nccl_runs_what_it_gets_in_order(program: Callable[[], None], what: str) -> None:
    assert previewed(program, "nccl") == []
    assert previewed(program, "gloo") == [what]
    assert previewed(program, "nccl", backend="gloo") == [what]


def test_a_touch_is_found_on_nccl() -> None:
    assert previewed(synchronizes(lambda: None), "nccl") == ["touched-in-flight"]


def test_a_preview_takes_away_no_patch_of_a_later_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is first installed during a preview stands on the preview's own patches."""
    monkeypatch.setattr(dist.Work, "get_future", inspect.unwrap(dist.Work.__dict__["get_future"]))
    with FakeWorld(2, 0):
        watching = BufferWatch()
        watching.start()
        watching.stop()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    watching = BufferWatch()
    watching.start()
    try:
        _, work = shared()
        work.get_future()
        assert _get_current_dispatch_mode_stack() == []
    finally:
        watching.stop()
        dist.destroy_process_group()
