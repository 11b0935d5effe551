"""Each adapter on the stand-in for its library: which call, in which group, with whom."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commlens.tap import libraries, library_adapters
from commlens.tap.libraries import LibraryCall
from commlens.tap.library_adapters import ADAPTERS
from past_torch import SITE, adapted

COMMUNICATORS = "distributed.device_communicators"


class Group:
    """A process group of one rank, for stand-ins that then wait for nobody."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[list[tuple[LibraryCall, int, str]]]:
    told: list[tuple[LibraryCall, int, str]] = []
    with adapted(ADAPTERS, SITE) as patched:
        patched.setenv("PAST_TORCH_DIR", str(tmp_path))
        patched.setattr("torch.distributed.get_process_group_ranks", lambda group: [0])
        libraries.listen(
            lambda call, number, name, frame: told.append((call, number, name)), lambda *_: None
        )
        yield told


def ops(calls: list[tuple[LibraryCall, int, str]]) -> list[tuple[str, int, str]]:
    return [(call.op, number, name) for call, number, name in calls]


def test_deep_ep(calls: list[tuple[LibraryCall, int, str]]) -> None:
    buffer = importlib.import_module("deep_ep").Buffer(Group(), 1 << 20)
    rows, chosen = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int64)
    *_, handle, _ = buffer.dispatch((rows, rows), topk_idx=chosen)
    buffer.combine(rows, handle)
    buffer.dispatch(rows, handle)
    buffer.low_latency_dispatch(rows, chosen, 128, 8)
    buffer.low_latency_combine(rows, chosen, chosen, handle)
    buffer.dispatch(rows, topk_idx=chosen, num_worst_tokens=64)  # asks no rank for its counts
    assert ops(calls) == [
        ("dispatch", 1, "deep_ep.Buffer.dispatch"),
        ("combine", 2, "deep_ep.Buffer.combine"),
        ("dispatch", 3, "deep_ep.Buffer.dispatch"),
        ("low_latency_dispatch", 4, "deep_ep.Buffer.low_latency_dispatch"),
        ("low_latency_combine", 5, "deep_ep.Buffer.low_latency_combine"),
        ("dispatch", 6, "deep_ep.Buffer.dispatch"),
    ]
    assert [call.waits for call, *_ in calls] == [True, *[False] * 5]
    assert all(call.tensor is rows for call, *_ in calls)
    assert {call.group.process_group() for call, *_ in calls} == {buffer.group}


@pytest.mark.parametrize(("library", "package"), [("vllm", "vllm"), ("sglang", "sglang.srt")])
def test_custom_all_reduce(
    calls: list[tuple[LibraryCall, int, str]], library: str, package: str
) -> None:
    kernel = importlib.import_module(f"{package}.{COMMUNICATORS}.custom_all_reduce")
    communicator = kernel.CustomAllreduce(Group(), "cpu")
    value = torch.ones(4)
    assert communicator.custom_all_reduce(value).equal(value)
    assert communicator.custom_all_reduce(torch.ones(3)) is None, "torch reduces it instead"
    assert ops(calls) == [("custom_all_reduce", 1, f"{library}.CustomAllreduce.all_reduce")]


def test_ray(calls: list[tuple[LibraryCall, int, str]]) -> None:
    importlib.import_module("ray")
    nccl = importlib.import_module("ray.util.collective.collective_group.nccl_collective_group")
    group, value = nccl.NCCLGroup(1, 0, "weights"), torch.ones(4)
    group.allreduce([value])
    group.broadcast([value], nccl.BroadcastOptions())
    group.barrier()
    assert ops(calls) == [
        ("all_reduce", 1, "ray.NCCLGroup.allreduce"),
        ("broadcast", 2, "ray.NCCLGroup.broadcast"),
        ("barrier", 3, "ray.NCCLGroup.barrier"),
    ]
    assert [call.root for call, *_ in calls] == [-1, 0, -1]
    made = calls[0][0].group.made
    assert made is not None
    job = os.environ["PAST_TORCH_DIR"]
    assert (made.member, made.size) == (0, 1)
    assert made.store == f"ray/127.0.0.1:6379/{job}/weights"
    again = nccl.NCCLGroup(1, 0, "weights")  # destroyed and made again, as for each update
    again.barrier()
    assert calls[-1][0].group.made == made._replace(ordinal=made.ordinal + 1)


def test_messages_of_ray_are_counted_by_peer(calls: list[tuple[LibraryCall, int, str]]) -> None:
    importlib.import_module("ray")
    nccl = importlib.import_module("ray.util.collective.collective_group.nccl_collective_group")
    group = nccl.NCCLGroup(3, 0, "pairs")
    group._pair = lambda *_: SimpleNamespace(meet=lambda: None)
    for peer in (1, 2, 1):
        options = nccl.SendOptions()
        options.dst_rank = peer
        group.send([torch.ones(1)], options)
    assert [(call.peer, number) for call, number, _ in calls] == [(1, 1), (2, 1), (1, 2)]


def test_nvshmem(calls: list[tuple[LibraryCall, int, str]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RANK", "0")
        patched.setenv("WORLD_SIZE", "1")
        importlib.import_module("nvshmem.core").barrier_all()
    assert ops(calls) == [("barrier_all", 1, "nvshmem4py.barrier_all")]
    assert calls[0][0].group.made is not None
    assert calls[0][0].group.made.store == "", "nothing tells which PE is which process"


def test_symmetric_memory_is_numbered_once_a_group() -> None:
    group = Group()
    described = [library_adapters._rendezvous(None, {"group": group}) for _ in range(2)]
    assert [call is not None and call.is_numbered for call in described] == [True, False]


def test_the_signatures_of_torch_fit() -> None:
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    (adapter,) = [each for each in ADAPTERS if each.module == memory.__name__]
    original: Any = memory.rendezvous
    assert libraries._has_parameters(original, adapter.calls["rendezvous"][1])
