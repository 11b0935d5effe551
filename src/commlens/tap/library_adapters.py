"""The libraries whose calls past torch's dispatcher are recorded. An adapter reads what its library
calls by name, and is written from the library's source; docs/rl-and-serving.md names the versions.
"""

from __future__ import annotations

import functools
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
    made_by,
    of_process_group,
)
from commlens.tap.message_queues import noting

Calls = dict[str, tuple[Describe, tuple[str, ...]]]

# --- DeepEP: every rank of the group calls all of these but those with a peer


def _deep_ep(
    op: str, sent: str = "", peer: str = "", *, waits: Callable[[Given], Any] = lambda given: False
) -> Describe:
    def describe(buffer: Any, given: Given) -> LibraryCall | None:
        rows = given.get(sent)
        return LibraryCall(
            of_process_group(buffer.group, "deep_ep"),
            op,
            rows[0] if isinstance(rows, tuple) else rows,
            peer=given.get(peer, -1),
            waits=bool(waits(given)),
        )

    return describe


def _waits_for_counts(given: Given) -> bool:
    """Whether the host waits until all ranks have told how much they send: without the layout of an
    earlier dispatch, and without room for the most that they may send.
    """
    return (
        given.get("handle") is None
        and not given.get("num_worst_tokens")
        and given.get("do_cpu_sync") is not False
    )


_DISPATCH: Final = _deep_ep("dispatch", "x", waits=_waits_for_counts)
_DEEP_EP: Final[Calls] = {
    "dispatch": (_DISPATCH, ("x", "handle")),
    "combine": (_deep_ep("combine", "x"), ("x", "handle")),
    "low_latency_dispatch": (_deep_ep("low_latency_dispatch", "x"), ("x", "topk_idx")),
    "low_latency_combine": (_deep_ep("low_latency_combine", "x"), ("x", "topk_idx", "handle")),
}
_ELASTIC: Final[Calls] = {
    "dispatch": (_DISPATCH, ("x", "handle", "do_cpu_sync")),
    "combine": (_deep_ep("combine", "x"), ("x", "handle")),
    "barrier": (
        _deep_ep("barrier", waits=lambda given: given.get("with_cpu_sync")),
        ("with_cpu_sync",),
    ),
    "all_gather": (_deep_ep("all_gather", "t"), ("t",)),
    "engram_write": (_deep_ep("engram_write", "storage"), ("storage",)),
    "pp_send": (_deep_ep("send", "t", "dst_rank_idx"), ("t", "dst_rank_idx")),
    "pp_recv": (_deep_ep("recv", "t", "src_rank_idx"), ("t", "src_rank_idx")),
}

# --- the all-reduce kernels of vLLM and SGLang


def _kernel(
    library: str, module: str, owner: str, *names: str, read: str = "inp", asks: str = ""
) -> Adapter:
    """Describe the methods of a kernel's class. ``asks`` names the method with which the class says
    whether it takes a tensor; a call with one that it declines is left out.
    """

    def describe(communicator: Any, given: Given) -> LibraryCall | None:
        tensor = given[read]
        if asks and not getattr(communicator, asks)(tensor):
            return None
        group = of_process_group(communicator.group, library)
        return LibraryCall(group, "custom_all_reduce", tensor)

    package = {"vllm": "vllm", "sglang": "sglang.srt"}[library]
    module = f"{package}.distributed.device_communicators.{module}"
    return Adapter(library, module, owner, dict.fromkeys(names, (describe, (read,))))


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

# --- torchcomms used directly. c10d does not call these methods, but C++: the dispatcher sees it


_split: dict[str, str] = {}
"""By the name of a communicator that was split off: its parent, name and ranks. Those of a device
mesh have one name on all ranks.
"""


def _torchcomms_path(comm: Any) -> str:
    name = str(comm.get_name())
    return _split.get(name, f"torchcomms/{name}")


def _torchcomms_group(comm: Any) -> LibraryGroup:
    """A communicator by its name, which all its ranks give."""
    made = count_made(comm.get_rank(), comm.get_size(), _torchcomms_path(comm))
    return LibraryGroup("torchcomms", made=made)


def _torchcomms(op: str, tensor: str = "") -> Describe:
    def describe(comm: Any, given: Given) -> LibraryCall | None:
        if op == "split":
            name = given.get("name")
            _split[str(name)] = f"{_torchcomms_path(comm)}/{name}/{given['ranks']}"
        return LibraryCall(
            group_of(comm, "torchcomms", lambda: _torchcomms_group(comm)),
            op,
            given.get(tensor),
            root=given.get("root", -1),
            peer=given["dst"] if "dst" in given else given.get("src", -1),
            # other backends only enqueue it on a device
            waits=op == "split" or (comm.get_backend() == "gloo" and not given["async_op"]),
        )

    return describe


_TORCHCOMMS: Final = {
    "all_reduce": ("tensor", "async_op"),
    "broadcast": ("tensor", "root", "async_op"),
    "reduce": ("tensor", "root", "async_op"),
    "all_gather": ("tensor", "async_op"),
    "all_gather_single": ("input", "async_op"),
    "reduce_scatter": ("output", "async_op"),
    "reduce_scatter_single": ("input", "async_op"),
    "all_to_all_single": ("input", "async_op"),
    "scatter": ("output_tensor", "root", "async_op"),
    "gather": ("input_tensor", "root", "async_op"),
    "gather_single": ("input", "root", "async_op"),
    "send": ("tensor", "dst", "async_op"),
    "recv": ("tensor", "src", "async_op"),
    # the ranks' sizes may differ
    "all_gather_v": ("", "async_op"),
    "reduce_scatter_v": ("", "async_op"),
    "all_to_all_v_single": ("", "async_op"),
    "all_to_all": ("", "async_op"),
    "barrier": ("", "async_op"),
    "split": ("", "ranks", "name"),
}
"""The tensor and the other parameters of each method."""

# --- torch's symmetric memory, and its windows from 2.15 on


def _rendezvous(_: Any, given: Given) -> LibraryCall | None:
    """The first one of a group: later ones may return what an earlier call has found, on some ranks
    and not on others.
    """
    import torch.distributed.distributed_c10d as c10d

    named = given["group"]
    process_group = c10d._resolve_process_group(named) if isinstance(named, str) else named
    group = of_process_group(process_group, "symmetric memory")
    is_first, group.is_used = not group.is_used, True
    return LibraryCall(group, "rendezvous", is_numbered=is_first, waits=True, makes=True)


def _new_window(process_group: Any, given: Given) -> LibraryCall | None:
    group = of_process_group(process_group, "torch window")
    return LibraryCall(group, "new_window", given.get("tensor"), waits=True, makes=True)


def _signal(
    library: str, op: str, peer: str = "", *, handle: str = "", tensor: str = ""
) -> Describe:
    """A signal is a message, and its sender waits for nobody. The calls of a handle whose group is
    unknown are left out.
    """

    def describe(owner: Any, given: Given) -> LibraryCall | None:
        group = made_by(given[handle] if handle else owner, library)
        if group is None:
            return None
        to = given.get(peer, -1)
        return LibraryCall(group, op, given.get(tensor), peer=to, waits=op == "send")

    return describe


_SYMMETRIC: Final = functools.partial(_signal, "symmetric memory")
_WINDOW: Final = functools.partial(_signal, "torch window")
_OF_TORCH: Final[dict[tuple[str, str, str], Calls]] = {
    ("symmetric memory", "torch.distributed._symmetric_memory", ""): {
        "rendezvous": (_rendezvous, ("tensor", "group")),
        "put_signal": (
            _SYMMETRIC("send", "peer", handle="hdl", tensor="src"),
            ("src", "hdl", "peer"),
        ),
        "wait_signal": (_SYMMETRIC("recv", "peer", handle="hdl"), ("hdl", "peer")),
    },
    ("symmetric memory", "torch._C._distributed_c10d", "_SymmetricMemory"): {
        "barrier": (_SYMMETRIC("barrier"), ("channel",)),
        "put_signal": (_SYMMETRIC("send", "dst_rank"), ("dst_rank", "channel")),
        "wait_signal": (_SYMMETRIC("recv", "src_rank"), ("src_rank", "channel")),
    },
    ("torch window", "torch._C._distributed_c10d", "ProcessGroup"): {
        "new_window": (_new_window, ("tensor",)),
    },
    ("torch window", "torch._C._distributed_c10d", "Window"): {
        "tensor_register": (_WINDOW("tensor_register", tensor="tensor"), ("tensor",)),
        "put": (_WINDOW("send", "dst_rank", tensor="tensor"), ("tensor", "dst_rank")),
        "signal": (_WINDOW("send", "peer_rank"), ("peer_rank",)),
        "wait_signal": (_WINDOW("recv", "peer_rank"), ("peer_rank",)),
    },
}

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
    Adapter("deep_ep", "deep_ep", "ElasticBuffer", _ELASTIC),
    _kernel("vllm", "custom_all_reduce", "CustomAllreduce", "all_reduce"),
    _kernel("vllm", "quick_all_reduce", "QuickAllReduce", "quick_all_reduce"),
    _kernel("vllm", "symm_mem", "SymmMemCommunicator", "all_reduce", asks="should_use_symm_mem"),
    _kernel(
        "vllm", "flashinfer_all_reduce", "FlashInferAllReduce", "all_reduce", read="input_tensor"
    ),
    _kernel(
        "sglang",
        "custom_all_reduce",
        "CustomAllreduce",
        "all_reduce",
        "all_reduce_reg",
        "all_reduce_unreg",
    ),
    _kernel(
        "sglang", "custom_all_reduce_v2", "CustomAllReduceV2", "custom_all_reduce", read="input"
    ),
    Adapter("ray", "ray.util.collective.collective_group.nccl_collective_group", "NCCLGroup", _RAY),
    Adapter(
        "torchcomms",
        "torchcomms",
        "TorchComm",
        {
            name: (_torchcomms(name, parameters[0]), tuple(filter(None, parameters)))
            for name, parameters in _TORCHCOMMS.items()
        },
    ),
    *(Adapter(*where, calls) for where, calls in _OF_TORCH.items()),
    Adapter(
        "nvshmem4py",
        "nvshmem.core.collective",
        "",
        {name: (_nvshmem(name), ()) for name in ("barrier_all", "sync_all")},
    ),
]
