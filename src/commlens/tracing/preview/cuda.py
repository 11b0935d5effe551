"""Previews of GPU programs: ``cuda`` becomes the CPU, and queries about GPUs get plausible answers,
also on a machine with GPUs.

Only the program gets these answers; torch's own code sees the real machine's GPUs, unless whoever
enters the fake world hides them before. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import types
from collections import defaultdict
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from commlens.tracing.patches import Patches, called_by_torch

_CPU = torch.device("cpu")
_MEMORY = 80 << 30
_PROPERTIES = types.SimpleNamespace(
    name="a fake GPU of commlens preview",
    total_memory=_MEMORY,
    major=9,
    minor=0,
    multi_processor_count=132,
    is_integrated=0,
)


def _on_cpu(value: Any) -> Any:
    """Replace ``cuda`` in any form by ``cpu``."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def _device_on_cpu(value: Any) -> Any:
    """Do the same where a number also names a GPU."""
    return "cpu" if isinstance(value, int) and not isinstance(value, bool) else _on_cpu(value)


_ASKED_BY_TORCH = ("is_available", "device_count", "is_initialized", "is_bf16_supported", "init")
_STAYING = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_TO = (torch.Tensor.to, torch._C._nn._parse_to)


class _CudaIsCpu(TorchFunctionMode):  # type: ignore[misc]
    """Maps devices in the arguments of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _STAYING:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.device:  # stays visible to the program; mapped where it is used
            return func(*args, **kwargs)
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _device_on_cpu(kwargs["device"])}
        if args and any(isinstance(each, (torch.device, str)) for each in args):
            args = tuple([_on_cpu(each) for each in args])
        elif func in _TO and any(type(each) is int for each in args):
            args = tuple(["cpu" if type(each) is int else each for each in args])
        return func(*args, **kwargs)


class FakeCuda:
    """Fake GPUs, while installed."""

    def __init__(self, local_rank: int, local_world_size: int) -> None:
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._mode = _CudaIsCpu()

    def install(self, patches: Patches) -> None:
        """Replace the queries about GPUs, and enter the mode."""
        cuda, accelerator = torch.cuda, getattr(torch, "accelerator", None)
        rank, count = self._local_rank, self._local_world_size
        nothing: Any = None
        answers: dict[str, Any] = {
            "is_available": True,
            "device_count": count,
            "current_device": rank,
            "is_initialized": True,
            "init": nothing,
            "set_device": nothing,
            "synchronize": nothing,
            "empty_cache": nothing,
            "ipc_collect": nothing,
            "is_bf16_supported": True,
            "get_device_name": _PROPERTIES.name,
            "get_device_properties": _PROPERTIES,
            "get_device_capability": (9, 0),
            "memory_allocated": 0,
            "max_memory_allocated": 0,
            "memory_reserved": 0,
            "max_memory_reserved": 0,
            "utilization": 0,
            "reset_peak_memory_stats": nothing,
            "reset_max_memory_allocated": nothing,
            "mem_get_info": (_MEMORY, _MEMORY),
            "memory_stats": defaultdict(int),
            "memory_summary": "",
            "set_per_process_memory_fraction": nothing,
            "set_rng_state": nothing,
            "current_stream": _NoOp(),
            "default_stream": _NoOp(),
            "set_stream": nothing,
            "graph_pool_handle": (0, 0),
            "memory_snapshot": [],
            "reset_accumulated_memory_stats": nothing,
            "set_sync_debug_mode": nothing,
            "get_sync_debug_mode": 0,
        }
        for name, answer in answers.items():
            # Calls that would raise without a GPU are answered for torch too, which makes them only
            # for a given device.
            patches.wrap(cuda, name, _answering(answer, for_torch=name not in _ASKED_BY_TORCH))
        patches.wrap(cuda, "get_rng_state", lambda original, *args, **kwargs: torch.get_rng_state())
        _Graph.captures = False
        patches.replace(cuda, "CUDAGraph", _Graph)
        patches.replace(cuda, "graph", _capture_of)
        patches.wrap(cuda, "is_current_stream_capturing", lambda original: _Graph.captures)
        patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patches.wrap(cuda.nccl, "version", _answering((2, 27, 3), for_torch=True))
        patches.replace(torch, "Generator", _Generator)
        for name in ("Stream", "Event"):
            patches.replace(torch, name, _NoOp)
        for name in ("Stream", "Event", "device", "stream", "MemPool", "use_mem_pool"):
            if isinstance(getattr(cuda, name, None), type):
                patches.replace(cuda, name, _NoOp)
            else:
                patches.wrap(cuda, name, _answering(_NoOp()))
        for name in ("range_push", "range_pop", "mark"):
            patches.wrap(cuda.nvtx, name, _answering(nothing, for_torch=True))
        if accelerator is not None:
            if hasattr(accelerator, "Graph"):  # not on all versions
                patches.replace(accelerator, "Graph", _Graph)
            device = torch.device("cuda", rank)
            for name, answer in (
                ("is_available", True),
                ("device_count", count),
                ("current_accelerator", torch.device("cuda")),
                ("set_device_index", nothing),
                ("set_device_idx", nothing),
                ("current_device_index", rank),
                ("current_device_idx", rank),
                ("synchronize", nothing),
                ("current_device", device),
                ("empty_cache", nothing),
                ("memory_allocated", 0),
                ("max_memory_allocated", 0),
                ("reset_peak_memory_stats", nothing),
                ("current_stream", _NoOp()),
            ):
                patches.wrap(accelerator, name, _answering(answer))
        import torch.distributed as dist

        for name in ("is_nccl_available", "is_backend_available"):
            patches.wrap(dist.distributed_c10d, name, _answering(True))
        _map_constructors(patches)
        self._mode.__enter__()

    def remove(self) -> None:
        """Leave the mode."""
        self._mode.__exit__(None, None, None)


class _NoOp:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoOp:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Wait for nothing. It is a method of its own, so that a watch of buffers sees the call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: (
            0.0 if name == "elapsed_time" else True if name == "query" else None
        )


class _Graph(_NoOp):
    """A CUDA graph. What is captured runs at once, and a replay runs nothing: its tensors keep the
    values of the capture.
    """

    captures = False

    def __enter__(self) -> _Graph:
        self.capture_begin()
        return self

    def __exit__(self, *_: Any) -> None:
        self.capture_end()

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note that work is captured."""
        _Graph.captures = True

    def capture_end(self) -> None:
        """Note that no work is captured any more."""
        _Graph.captures = False


class _GeneratorKind(type(torch.Generator)):  # type: ignore[misc]
    """The type of :class:`_Generator`, of which torch's own generators are instances, too."""

    def __instancecheck__(cls, each: Any) -> bool:
        return issubclass(type(each), cls.__base__)


class _Generator(torch.Generator, metaclass=_GeneratorKind):  # type: ignore[misc]
    """A generator of random numbers, on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, _device_on_cpu(device))


def _capture_of(cuda_graph: _Graph, *args: Any, **kwargs: Any) -> _Graph:
    """Stand for ``torch.cuda.graph``."""
    return cuda_graph


def _answering(answer: Any, *, for_torch: bool = False) -> Any:
    def instead(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if not for_torch and called_by_torch() else answer

    return instead


def _map_constructors(patches: Patches) -> None:
    """Map the devices of constructors and methods that the mode does not see."""
    import torch.distributed.device_mesh as device_mesh
    import torch.utils._device
    from torch.nn.parallel import DistributedDataParallel

    def device_type(original: Any, given: dict[str, Any]) -> Any:
        return original(**{**given, "device_type": _on_cpu(given["device_type"])})

    def no_devices(*names: str) -> Any:
        return lambda original, given: original(
            **{name: value for name, value in given.items() if name not in names}
        )

    patches.wrap(
        torch.utils._device.DeviceContext,
        "__init__",
        lambda original, self, device: original(self, _device_on_cpu(device)),
    )
    patches.wrap_named(device_mesh.DeviceMesh, "__init__", device_type)
    patches.wrap_named(torch.amp.autocast_mode.autocast, "__init__", device_type)
    patches.wrap_named(
        DistributedDataParallel, "__init__", no_devices("device_ids", "output_device")
    )
    patches.wrap(torch.nn.Module, "cuda", lambda original, self, device=None: self)
    patches.wrap(
        torch,
        "load",
        lambda original, *args, **kwargs: original(*args, **{**kwargs, "map_location": "cpu"}),
    )
    with contextlib.suppress(ImportError):
        from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils

        patches.wrap(_init_utils, "_init_device_handle", _init_device_handle_on_cpu)
        patches.wrap_named(FullyShardedDataParallel, "__init__", no_devices("device_id"))
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.tensor import _collective_utils

        patches.wrap(_collective_utils, "shard_dim_alltoall", _alltoall_as_on_gpus)


def _init_device_handle_on_cpu(
    original: Any, state: Any, module: Any, ignored_params: Any, device_id: Any
) -> Any:
    """Give FSDP1 a CPU device: it refuses to run without an accelerator (2.13.0)."""
    return original(state, module, ignored_params, _CPU)


def _alltoall_as_on_gpus(
    original: Any, input: Any, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
) -> Any:
    """Use the all-to-all of GPU meshes; on a CPU mesh DTensor gathers instead."""
    return torch.ops._dtensor.shard_dim_alltoall(
        input, gather_dim, shard_dim, mesh.get_group(mesh_dim).group_name
    )
