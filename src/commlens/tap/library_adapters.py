"""The libraries whose calls past torch's dispatcher are recorded. An adapter reads what its library
calls by name, and is written from the library's source; docs/rl-and-serving.md names the versions.

``AdaptedCall(describe, needed)`` records a method that has the parameters ``needed``. For each of
its calls, ``describe(self, arguments)`` returns a ``LibraryCall``, or None to leave the call out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from commlens.tap.hand_made import Membership, count_made
from commlens.tap.libraries import (
    AdaptedCall,
    Adapter,
    Given,
    LibraryCall,
    LibraryGroup,
    group_of,
    made_by,
    of_process_group,
)
from commlens.tap.message_queues import noting

# --- DeepEP: every rank of the group calls all of these but those with a peer


def _deep_ep(
    op: str,
    *needed: str,
    sent: str = "",
    peer: str = "",
    waits: Callable[[Given], Any] = lambda given: False,
) -> AdaptedCall:
    """Record a call. ``sent`` and ``peer`` name its parameters for the tensor and the peer."""

    def describe(buffer: Any, given: Given) -> LibraryCall:
        group = of_process_group(buffer.group, "deep_ep")
        rows = given.get(sent)
        tensor = rows[0] if isinstance(rows, tuple) else rows
        return LibraryCall(group, op, tensor, peer=given.get(peer, -1), waits=bool(waits(given)))

    return AdaptedCall(describe, needed)


def _waits_for_counts(given: Given) -> bool:
    """Whether the host waits until all ranks have told how much they send: without the layout of an
    earlier dispatch, and without room for the most that they may send.
    """
    return (
        given.get("handle") is None
        and not given.get("num_worst_tokens")
        and given.get("do_cpu_sync") is not False
    )


_DEEP_EP: Final = Adapter(
    "deep_ep",
    "deep_ep",
    "Buffer",
    {
        "dispatch": _deep_ep("dispatch", "x", "handle", sent="x", waits=_waits_for_counts),
        "combine": _deep_ep("combine", "x", "handle", sent="x"),
        "low_latency_dispatch": _deep_ep("low_latency_dispatch", "x", "topk_idx", sent="x"),
        "low_latency_combine": _deep_ep("low_latency_combine", "x", "topk_idx", "handle", sent="x"),
    },
)
_DEEP_EP_ELASTIC: Final = Adapter(
    "deep_ep",
    "deep_ep",
    "ElasticBuffer",
    {
        "dispatch": _deep_ep(
            "dispatch", "x", "handle", "do_cpu_sync", sent="x", waits=_waits_for_counts
        ),
        "combine": _deep_ep("combine", "x", "handle", sent="x"),
        "barrier": _deep_ep(
            "barrier", "with_cpu_sync", waits=lambda given: given.get("with_cpu_sync")
        ),
        "all_gather": _deep_ep("all_gather", "t", sent="t"),
        "engram_write": _deep_ep("engram_write", "storage", sent="storage"),
        "pp_send": _deep_ep("send", "t", "dst_rank_idx", sent="t", peer="dst_rank_idx"),
        "pp_recv": _deep_ep("recv", "t", "src_rank_idx", sent="t", peer="src_rank_idx"),
    },
)

# --- the all-reduce kernels and the message queues of vLLM and SGLang


def _vllm(module: str, owner: str, calls: dict[str, AdaptedCall], *more: Any) -> Adapter:
    return Adapter("vllm", f"vllm.distributed.device_communicators.{module}", owner, calls, *more)


def _sglang(module: str, owner: str, calls: dict[str, AdaptedCall], *more: Any) -> Adapter:
    module = f"sglang.srt.distributed.device_communicators.{module}"
    return Adapter("sglang", module, owner, calls, *more)


def _all_reduce(library: str, *, tensor: str = "inp", asks: str = "") -> AdaptedCall:
    """Record a call of a kernel. ``asks`` names the method with which its class says whether it
    takes a tensor; a call with one that it declines is left out.
    """

    def describe(communicator: Any, given: Given) -> LibraryCall | None:
        if asks and not getattr(communicator, asks)(given[tensor]):
            return None
        group = of_process_group(communicator.group, library)
        return LibraryCall(group, "custom_all_reduce", given[tensor])

    return AdaptedCall(describe, (tensor,))


def _no_call(_: Any, given: Given) -> None:
    return None


_QUEUE_ENDS: Final = {
    "enqueue": AdaptedCall(_no_call, ("self", "obj")),
    "dequeue": AdaptedCall(_no_call, ("self",)),
}
_ASKING: Final = _all_reduce("vllm", asks="should_use_symm_mem")
_VLLM: Final = [
    _vllm("shm_broadcast", "MessageQueue", _QUEUE_ENDS, noting),
    _vllm("custom_all_reduce", "CustomAllreduce", {"all_reduce": _all_reduce("vllm")}),
    _vllm("quick_all_reduce", "QuickAllReduce", {"quick_all_reduce": _all_reduce("vllm")}),
    _vllm("symm_mem", "SymmMemCommunicator", {"all_reduce": _ASKING}),
    _vllm(
        "flashinfer_all_reduce",
        "FlashInferAllReduce",
        {"all_reduce": _all_reduce("vllm", tensor="input_tensor")},
    ),
]
_SGLANG: Final = [
    _sglang("shm_broadcast", "MessageQueue", _QUEUE_ENDS, noting),
    _sglang(
        "custom_all_reduce",
        "CustomAllreduce",
        dict.fromkeys(("all_reduce", "all_reduce_reg", "all_reduce_unreg"), _all_reduce("sglang")),
    ),
    _sglang(
        "custom_all_reduce_v2",
        "CustomAllReduceV2",
        {"custom_all_reduce": _all_reduce("sglang", tensor="input")},
    ),
]

# --- NCCL groups of Ray, which torch does not know


def _ray_group(group: Any) -> LibraryGroup:
    """A group by its name, which is unique in a job of a cluster."""
    context = sys.modules["ray"].get_runtime_context()
    store = f"ray/{context.gcs_address}/{context.get_job_id()}/{group.group_name}"
    return LibraryGroup("ray", made=count_made(group.rank, group.world_size, store))


def _ray(op: str, *, tensors: str = "tensors", options: str = "") -> AdaptedCall:
    """Record a call. ``options`` names its parameter that holds the root or the peer."""

    def describe(group: Any, given: Given) -> LibraryCall:
        sent, chosen = given.get(tensors), given.get(options)
        return LibraryCall(
            group_of(group, "ray", lambda: _ray_group(group)),
            op,
            sent[0] if sent else None,
            root=getattr(chosen, "root_rank", -1),
            peer=getattr(chosen, "dst_rank", getattr(chosen, "src_rank", -1)),
        )

    return AdaptedCall(describe, tuple(name for name in (tensors, options) if name))


_RAY: Final = Adapter(
    "ray",
    "ray.util.collective.collective_group.nccl_collective_group",
    "NCCLGroup",
    {
        "allreduce": _ray("all_reduce"),
        "barrier": _ray("barrier", tensors=""),
        "reduce": _ray("reduce", options="reduce_options"),
        "broadcast": _ray("broadcast", options="broadcast_options"),
        "allgather": _ray("all_gather"),
        "reducescatter": _ray("reduce_scatter"),
        "send": _ray("send", options="send_options"),
        "recv": _ray("recv", options="recv_options"),
    },
)

# --- torchcomms used directly. c10d does not call these methods, but C++: the dispatcher sees it


_split_stores: dict[str, str] = {}
"""By the name of a communicator that was split off: the store by which its members find each other,
of its parent, its name and its ranks. Communicators of a device mesh have one name on all ranks.
"""


def _torchcomms_store(comm: Any) -> str:
    name = str(comm.get_name())
    return _split_stores.get(name, f"torchcomms/{name}")


def _torchcomms_group(comm: Any) -> LibraryGroup:
    made = count_made(comm.get_rank(), comm.get_size(), _torchcomms_store(comm))
    return LibraryGroup("torchcomms", made=made)


def _torchcomms(op: str, *needed: str, tensor: str = "") -> AdaptedCall:
    """Record a call. ``tensor`` names its parameter for the tensor."""

    def describe(comm: Any, given: Given) -> LibraryCall:
        if op == "split":
            name = str(given.get("name"))
            _split_stores[name] = f"{_torchcomms_store(comm)}/{name}/{given['ranks']}"
        return LibraryCall(
            group_of(comm, "torchcomms", lambda: _torchcomms_group(comm)),
            op,
            given.get(tensor),
            root=given.get("root", -1),
            peer=given["dst"] if "dst" in given else given.get("src", -1),
            # other backends only enqueue it on a device
            waits=op == "split" or (comm.get_backend() == "gloo" and not given["async_op"]),
        )

    return AdaptedCall(describe, (tensor, *needed) if tensor else needed)


_TORCHCOMMS: Final = Adapter(
    "torchcomms",
    "torchcomms",
    "TorchComm",
    {
        "all_reduce": _torchcomms("all_reduce", "async_op", tensor="tensor"),
        "broadcast": _torchcomms("broadcast", "root", "async_op", tensor="tensor"),
        "reduce": _torchcomms("reduce", "root", "async_op", tensor="tensor"),
        "all_gather": _torchcomms("all_gather", "async_op", tensor="tensor"),
        "all_gather_single": _torchcomms("all_gather_single", "async_op", tensor="input"),
        "reduce_scatter": _torchcomms("reduce_scatter", "async_op", tensor="output"),
        "reduce_scatter_single": _torchcomms("reduce_scatter_single", "async_op", tensor="input"),
        "all_to_all_single": _torchcomms("all_to_all_single", "async_op", tensor="input"),
        "scatter": _torchcomms("scatter", "root", "async_op", tensor="output_tensor"),
        "gather": _torchcomms("gather", "root", "async_op", tensor="input_tensor"),
        "gather_single": _torchcomms("gather_single", "root", "async_op", tensor="input"),
        "send": _torchcomms("send", "dst", "async_op", tensor="tensor"),
        "recv": _torchcomms("recv", "src", "async_op", tensor="tensor"),
        # no tensor: the ranks' sizes may differ
        "all_gather_v": _torchcomms("all_gather_v", "async_op"),
        "reduce_scatter_v": _torchcomms("reduce_scatter_v", "async_op"),
        "all_to_all_v_single": _torchcomms("all_to_all_v_single", "async_op"),
        "all_to_all": _torchcomms("all_to_all", "async_op"),
        "barrier": _torchcomms("barrier", "async_op"),
        "split": _torchcomms("split", "ranks", "name"),
    },
)

# --- torch's symmetric memory, and its windows from 2.15 on


def _rendezvous(_: Any, given: Given) -> LibraryCall:
    """Number the first one of a group only: later ones may return what an earlier call has found,
    on some ranks and not on others.
    """
    import torch.distributed.distributed_c10d as c10d

    named = given["group"]
    process_group = c10d._resolve_process_group(named) if isinstance(named, str) else named
    group = of_process_group(process_group, "symmetric memory")
    is_first, group.is_used = not group.is_used, True
    return LibraryCall(group, "rendezvous", is_numbered=is_first, waits=True, makes=True)


def _new_window(process_group: Any, given: Given) -> LibraryCall:
    group = of_process_group(process_group, "torch window")
    return LibraryCall(group, "new_window", given.get("tensor"), waits=True, makes=True)


def _one_sided(
    library: str, op: str, *needed: str, peer: str = "", handle: str = "", tensor: str = ""
) -> AdaptedCall:
    """Record a call with a handle. ``peer``, ``handle`` and ``tensor`` name its parameters; without
    ``handle``, it is a method of the handle itself. A signal is a message, and its sender waits
    for nobody. The calls of a handle whose group is unknown are left out.
    """

    def describe(owner: Any, given: Given) -> LibraryCall | None:
        group = made_by(given[handle] if handle else owner, library)
        if group is None:
            return None
        to = given.get(peer, -1)
        return LibraryCall(group, op, given.get(tensor), peer=to, waits=op == "send")

    return AdaptedCall(describe, tuple(name for name in (tensor, handle, peer, *needed) if name))


def _symmetric(op: str, *needed: str, **parameters: str) -> AdaptedCall:
    return _one_sided("symmetric memory", op, *needed, **parameters)


def _window(op: str, **parameters: str) -> AdaptedCall:
    return _one_sided("torch window", op, **parameters)


_OF_TORCH: Final = [
    Adapter(
        "symmetric memory",
        "torch.distributed._symmetric_memory",
        "",
        {
            "rendezvous": AdaptedCall(_rendezvous, ("tensor", "group")),
            "put_signal": _symmetric("send", peer="peer", handle="hdl", tensor="src"),
            "wait_signal": _symmetric("recv", peer="peer", handle="hdl"),
        },
    ),
    Adapter(
        "symmetric memory",
        "torch._C._distributed_c10d",
        "_SymmetricMemory",
        {
            "barrier": _symmetric("barrier", "channel"),
            "put_signal": _symmetric("send", "channel", peer="dst_rank"),
            "wait_signal": _symmetric("recv", "channel", peer="src_rank"),
        },
    ),
    Adapter(
        "torch window",
        "torch._C._distributed_c10d",
        "ProcessGroup",
        {"new_window": AdaptedCall(_new_window, ("tensor",))},
    ),
    Adapter(
        "torch window",
        "torch._C._distributed_c10d",
        "Window",
        {
            "tensor_register": _window("tensor_register", tensor="tensor"),
            "put": _window("send", peer="dst_rank", tensor="tensor"),
            "signal": _window("send", peer="peer_rank"),
            "wait_signal": _window("recv", peer="peer_rank"),
        },
    ),
]

# --- NVSHMEM from Python: nothing tells which process is which PE of another job's processes


def _nvshmem(op: str) -> AdaptedCall:
    def describe(_: Any, given: Given) -> LibraryCall:
        core = sys.modules["nvshmem.core"]
        made = Membership(core.my_pe(), core.n_pes(), "", 0)
        group = group_of(core.init, "nvshmem4py", lambda: LibraryGroup("nvshmem4py", made=made))
        return LibraryCall(group, op)

    return AdaptedCall(describe)


_NVSHMEM: Final = Adapter(
    "nvshmem4py",
    "nvshmem.core.collective",
    "",
    {"barrier_all": _nvshmem("barrier_all"), "sync_all": _nvshmem("sync_all")},
)

ADAPTERS: Final = [
    *_VLLM,
    *_SGLANG,
    _DEEP_EP,
    _DEEP_EP_ELASTIC,
    _RAY,
    _TORCHCOMMS,
    *_OF_TORCH,
    _NVSHMEM,
]
