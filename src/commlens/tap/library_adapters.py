"""The libraries whose calls past torch's dispatcher are recorded. An adapter reads what its library
calls by name, and is written from the library's source; docs/rl-and-serving.md names the versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from commlens.tap.hand_made import Membership, count_made
from commlens.tap.libraries import (
    Adapter,
    Describe,
    Given,
    LibraryCall,
    LibraryGroup,
    group_of,
    of_process_group,
)
from commlens.tap.message_queues import noting

# --- DeepEP: every rank of the group calls dispatch and combine


def _deep_ep(op: str, *, waits: Callable[[Given], bool] = lambda given: False) -> Describe:
    def describe(buffer: Any, given: Given) -> LibraryCall | None:
        sent = given["x"]
        return LibraryCall(
            of_process_group(buffer.group, "deep_ep"),
            op,
            sent[0] if isinstance(sent, tuple) else sent,
            waits=waits(given),
        )

    return describe


def _waits_for_counts(given: Given) -> bool:
    """Whether the host waits until all ranks have told how much they send: without the layout of an
    earlier dispatch, and without room for the most that they may send.
    """
    return given.get("handle") is None and not given.get("num_worst_tokens")


_DEEP_EP: Final = {
    "dispatch": (_deep_ep("dispatch", waits=_waits_for_counts), ("x", "handle")),
    "combine": (_deep_ep("combine"), ("x", "handle")),
    "low_latency_dispatch": (_deep_ep("low_latency_dispatch"), ("x", "topk_idx")),
    "low_latency_combine": (_deep_ep("low_latency_combine"), ("x", "topk_idx", "handle")),
}

# --- the all-reduce kernels of vLLM and SGLang


def _custom_all_reduce(library: str, tensor: str) -> Describe:
    def describe(communicator: Any, given: Given) -> LibraryCall | None:
        group = of_process_group(communicator.group, library)
        return LibraryCall(group, "custom_all_reduce", given[tensor])

    return describe


# --- NCCL groups of Ray, which torch does not know


def _ray_group(group: Any) -> LibraryGroup:
    """A group by its name, which is unique in a job of a cluster."""
    context = sys.modules["ray"].get_runtime_context()
    store = f"ray/{context.gcs_address}/{context.get_job_id()}/{group.group_name}"
    return LibraryGroup("ray", made=count_made(group.rank, group.world_size, store))


def _ray(op: str, options: str = "", tensors: str = "tensors") -> Describe:
    def describe(group: Any, given: Given) -> LibraryCall | None:
        chosen, sent = given.get(options), given.get(tensors)
        return LibraryCall(
            group_of(group, "ray", lambda: _ray_group(group)),
            op,
            sent[0] if sent and op != "barrier" else None,
            root=getattr(chosen, "root_rank", -1),
            peer=getattr(chosen, "dst_rank", getattr(chosen, "src_rank", -1)),
        )

    return describe


_RAY: Final = {
    "allreduce": (_ray("all_reduce"), ("tensors",)),
    "barrier": (_ray("barrier"), ()),
    "reduce": (_ray("reduce", "reduce_options"), ("tensors", "reduce_options")),
    "broadcast": (_ray("broadcast", "broadcast_options"), ("tensors", "broadcast_options")),
    "allgather": (_ray("all_gather"), ("tensors",)),
    "reducescatter": (_ray("reduce_scatter"), ("tensors",)),
    "send": (_ray("send", "send_options"), ("tensors", "send_options")),
    "recv": (_ray("recv", "recv_options"), ("tensors", "recv_options")),
}

# --- torch's symmetric memory


def _rendezvous(_: Any, given: Given) -> LibraryCall | None:
    """The first one of a group: later ones may return what an earlier call has found, on some ranks
    and not on others.
    """
    import torch.distributed.distributed_c10d as c10d

    named = given["group"]
    process_group = c10d._resolve_process_group(named) if isinstance(named, str) else named
    group = of_process_group(process_group, "symmetric memory")
    is_first, group.is_used = not group.is_used, True
    return LibraryCall(group, "rendezvous", is_numbered=is_first, waits=True)


# --- NVSHMEM from Python: nothing tells which process is which PE of another job's processes


def _nvshmem(op: str) -> Describe:
    def describe(_: Any, given: Given) -> LibraryCall | None:
        core = sys.modules["nvshmem.core"]
        made = Membership(core.my_pe(), core.n_pes(), "", 0)
        group = group_of(core.init, "nvshmem4py", lambda: LibraryGroup("nvshmem4py", made=made))
        return LibraryCall(group, op)

    return describe


def _message_queue(library: str, package: str) -> Adapter:
    calls: dict[str, tuple[Describe, tuple[str, ...]]] = {
        "enqueue": (_nothing, ("self", "obj")),
        "dequeue": (_nothing, ("self",)),
    }
    module = f"{package}.distributed.device_communicators.shm_broadcast"
    return Adapter(library, module, "MessageQueue", calls, noting)


def _nothing(_: Any, given: Given) -> None:
    return None


ADAPTERS: Final = [
    _message_queue("vllm", "vllm"),
    _message_queue("sglang", "sglang.srt"),
    Adapter("deep_ep", "deep_ep", "Buffer", _DEEP_EP),
    Adapter(
        "vllm",
        "vllm.distributed.device_communicators.custom_all_reduce",
        "CustomAllreduce",
        {"all_reduce": (_custom_all_reduce("vllm", "inp"), ("inp", "registered"))},
    ),
    Adapter(
        "sglang",
        "sglang.srt.distributed.device_communicators.custom_all_reduce",
        "CustomAllreduce",
        {
            name: (_custom_all_reduce("sglang", "inp"), ("inp", "out"))
            for name in ("all_reduce", "all_reduce_reg", "all_reduce_unreg")
        },
    ),
    Adapter("ray", "ray.util.collective.collective_group.nccl_collective_group", "NCCLGroup", _RAY),
    Adapter(
        "symmetric memory",
        "torch.distributed._symmetric_memory",
        "",
        {"rendezvous": (_rendezvous, ("tensor", "group"))},
    ),
    Adapter(
        "nvshmem4py",
        "nvshmem.core.collective",
        "",
        {name: (_nvshmem(name), ()) for name in ("barrier_all", "sync_all")},
    ),
]
