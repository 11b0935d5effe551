"""Each adapter on the stand-in for its library: which call, in which group, with whom."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch._C import _distributed_c10d
from torch.distributed import _symmetric_memory

from commlens.tap import libraries
from commlens.tap.call_arguments import signature_of
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


def test_the_elastic_buffer_of_deep_ep(calls: list[tuple[LibraryCall, int, str]]) -> None:
    buffer = importlib.import_module("deep_ep").ElasticBuffer(Group())
    rows = torch.ones(4, 8)
    *_, handle, _ = buffer.dispatch(rows)
    buffer.combine(rows, handle)
    buffer.dispatch(rows, handle=handle)
    buffer.dispatch(rows, do_cpu_sync=False)
    buffer.barrier(with_cpu_sync=True)
    buffer.all_gather(rows)
    buffer.engram_write(rows)
    buffer.pp_send(rows, 0)
    buffer.pp_recv(rows, 0)
    assert [(call.op, number, call.waits) for call, number, _ in calls] == [
        ("dispatch", 1, True),
        ("combine", 2, False),
        ("dispatch", 3, False),
        ("dispatch", 4, False),
        ("barrier", 5, True),
        ("all_gather", 6, False),
        ("engram_write", 7, False),
        ("send", 1, False),
        ("recv", 1, False),
    ]
    assert [call.peer for call, *_ in calls[-3:]] == [-1, 0, 0]


@pytest.mark.parametrize(
    ("module", "owner", "method", "dtype"),
    [
        ("vllm", "quick_all_reduce.QuickAllReduce", "quick_all_reduce", torch.float32),
        ("vllm", "symm_mem.SymmMemCommunicator", "all_reduce", torch.bfloat16),
        ("vllm", "flashinfer_all_reduce.FlashInferAllReduce", "all_reduce", torch.float32),
        (
            "sglang.srt",
            "custom_all_reduce_v2.CustomAllReduceV2",
            "custom_all_reduce",
            torch.float32,
        ),
    ],
)
def test_other_all_reduce_kernels(
    calls: list[tuple[LibraryCall, int, str]], module: str, owner: str, method: str, dtype: Any
) -> None:
    file, name = owner.split(".")
    kernel = importlib.import_module(f"{module}.{COMMUNICATORS}.{file}")
    value = torch.ones(4, dtype=dtype)
    communicator = getattr(kernel, name)(Group(), "cpu")
    assert getattr(communicator, method)(value).equal(value)
    library = module.partition(".")[0]
    assert ops(calls) == [("custom_all_reduce", 1, f"{library}.{name}.{method}")]
    assert calls[0][0].tensor is value


def test_a_kernel_that_declines_a_tensor_is_not_recorded(
    calls: list[tuple[LibraryCall, int, str]],
) -> None:
    kernel = importlib.import_module(f"vllm.{COMMUNICATORS}.symm_mem")
    assert kernel.SymmMemCommunicator(Group(), "cpu").all_reduce(torch.ones(4)) is None
    assert calls == []


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


def test_torchcomms(calls: list[tuple[LibraryCall, int, str]]) -> None:
    torchcomms = importlib.import_module("torchcomms")
    comm, value = torchcomms.new_comm("gloo", "cpu", 0, 1, "dp"), torch.ones(4)
    comm.broadcast(value, 0, async_op=True)
    comm.all_reduce(value, "sum", False)
    comm.barrier(async_op=False)
    assert ops(calls) == [
        ("broadcast", 1, "torchcomms.TorchComm.broadcast"),
        ("all_reduce", 2, "torchcomms.TorchComm.all_reduce"),
        ("barrier", 3, "torchcomms.TorchComm.barrier"),
    ]
    made = calls[0][0].group.made
    assert made is not None
    assert (made.member, made.size, made.store, made.ordinal) == (0, 1, "torchcomms/dp", 0)
    assert [call.root for call, *_ in calls] == [0, -1, -1]
    assert [call.waits for call, *_ in calls] == [False, True, True]
    assert [call.tensor is value for call, *_ in calls] == [True, True, False]
    with pytest.raises(TypeError, match="incompatible"):
        comm.all_reduce(None, "sum", False)
    comm.barrier(False)
    assert calls[-1][1] == 0, "nothing tells whether the call that raised has communicated"


def test_messages_of_torchcomms_are_counted_by_peer(
    calls: list[tuple[LibraryCall, int, str]],
) -> None:
    comm = importlib.import_module("torchcomms").new_comm("gloo", "cpu", 0, 3, "pairs")
    comm._pair = lambda *_: SimpleNamespace(meet=lambda: None)
    for peer in (1, 2, 1):
        comm.send(torch.ones(1), peer, False)
    comm.recv(torch.ones(1), src=1, async_op=False)
    assert [(call.op, call.peer, number) for call, number, _ in calls] == [
        ("send", 1, 1),
        ("send", 2, 1),
        ("send", 1, 2),
        ("recv", 1, 1),
    ]


def test_nvshmem(calls: list[tuple[LibraryCall, int, str]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RANK", "0")
        patched.setenv("WORLD_SIZE", "1")
        importlib.import_module("nvshmem.core").barrier_all()
    assert ops(calls) == [("barrier_all", 1, "nvshmem4py.barrier_all")]
    assert calls[0][0].group.made is not None
    assert calls[0][0].group.made.store == "", "nothing tells which PE is which process"


@pytest.fixture
def one_sided(calls: Any) -> Iterator[Any]:
    """The stand-ins for torch's own classes, which are put back."""
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in (
            (_distributed_c10d, "_SymmetricMemory"),
            (_symmetric_memory, "_SymmetricMemory"),
            (_distributed_c10d, "Window"),
            (torch.distributed.ProcessGroup, "new_window"),
        ):
            patched.setattr(owner, name, None, raising=False)
        # torch 2.6's rendezvous first makes a store for the group
        enable = "enable_symm_mem_for_group"
        patched.setattr(_symmetric_memory, enable, lambda _: None, raising=False)
        resolve = "torch.distributed.distributed_c10d._resolve_process_group"
        patched.setattr(resolve, lambda name: {"0": GROUP}[name])
        yield importlib.import_module("one_sided")


GROUP = Group()


def test_symmetric_memory(calls: list[tuple[LibraryCall, int, str]], one_sided: Any) -> None:
    memory = one_sided.install()
    handle = memory.rendezvous(torch.ones(4), "0")
    handle.barrier()
    handle.put_signal(0)
    handle.wait_signal(0)
    memory.rendezvous(torch.ones(4), "0").barrier(channel=1)
    assert [(call.op, number, call.peer, call.waits) for call, number, _ in calls] == [
        ("rendezvous", 1, -1, True),
        ("barrier", 2, -1, False),
        ("send", 1, 0, True),
        ("recv", 1, 0, False),
        ("rendezvous", 0, -1, True),  # it may return what an earlier one has found
        ("barrier", 3, -1, False),
    ]
    assert {call.group.process_group() for call, *_ in calls} == {GROUP}
    one_sided.SymmetricMemory(GROUP, "unknown").barrier()
    assert len(calls) == 6, "the group of this handle is unknown"


def test_windows(calls: list[tuple[LibraryCall, int, str]], one_sided: Any) -> None:
    one_sided.install()
    window = torch.distributed.ProcessGroup.new_window(GROUP)  # type: ignore[attr-defined]
    window.tensor_register(torch.ones(4))
    window.put(torch.ones(4), 0, 0, False)
    window.signal(0, False)
    window.wait_signal(0, False)
    assert [(call.op, number, name) for call, number, name in calls] == [
        ("new_window", 1, "torch window.ProcessGroup.new_window"),
        ("tensor_register", 2, "torch window.Window.tensor_register"),
        ("send", 1, "torch window.Window.put"),
        ("send", 2, "torch window.Window.signal"),
        ("recv", 1, "torch window.Window.wait_signal"),
    ]


def test_the_signatures_of_torch_fit() -> None:
    fit = {}
    for adapter in ADAPTERS:
        if adapter.module.startswith("torch."):
            module: Any = sys.modules[adapter.module]
            owner = getattr(module, adapter.owner, None) if adapter.owner else module
            for name, call in adapter.calls.items():
                if hasattr(owner, name):
                    original = getattr(owner, name)
                    signature = signature_of(getattr(original, "__wrapped__", original))
                    assert signature is not None
                    fit[adapter.owner, name] = {*call.parameters} <= {*signature.parameters}
    assert fit["", "rendezvous"] and fit["_SymmetricMemory", "barrier"]
    assert all(fit.values()), fit
    assert libraries.installed(ADAPTERS)["symmetric memory"]


def test_the_methods_of_torch_are_replaced_in_place() -> None:
    """A handle cannot be made without a GPU: the call is refused, as without commlens."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("barrier", "put_signal", "wait_signal"):
            method = vars(_distributed_c10d._SymmetricMemory)[name]
            original = getattr(method, "__wrapped__", method)
            patched.setattr(_distributed_c10d._SymmetricMemory, name, original)
        with adapted(ADAPTERS):
            replaced = vars(_distributed_c10d._SymmetricMemory)["wait_signal"]
            assert getattr(replaced, "__wrapped__", None) is original
            with pytest.raises(TypeError, match="incompatible function arguments"):
                replaced(Group(), 0)
