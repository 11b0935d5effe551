"""Runs first in a rank of the tests' harness: the rest of the program, which asks for gloo and makes
its tensors on the CPU, then uses NCCL and the one GPU. _gpu_scenarios.py starts such ranks.

Two variables choose what it is given instead: GPU_CHECK_DEVICE and GPU_CHECK_BACKEND.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
from torch.distributed import distributed_c10d
from torch.utils import _device
from torch.utils._device import DeviceContext, _device_constructors

# A rank of the harness finds only what lies beside the harness.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from nccl_like.one_gpu import one_gpu_for_all

DEVICE, BACKEND = os.environ["GPU_CHECK_DEVICE"], os.environ["GPU_CHECK_BACKEND"]
GLOO_OR_DEFAULT = ("gloo", "undefined", "None")


def of_torch(module: Any, function: Any) -> Any:
    """Let the frames of a function count as torch's, so that no verdict names its lines."""
    function.__code__ = function.__code__.replace(co_filename=module.__file__)
    return function


class Everything(DeviceContext):
    """Makes tensors on the device, as torch.set_default_device() does, and moves there what a
    generator of the CPU draws.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if (
            given.get("generator") is not None
            and given.get("device") is None
            and func in _device_constructors()
        ):
            return func(*args, **given).to(self.device)
        return super().__torch_function__(func, types, args, kwargs)


def use_backend() -> None:
    """Give groups of gloo and of the default backend the chosen one."""
    original = distributed_c10d._new_process_group_helper

    def _new_process_group_helper(
        size: int, rank: int, ranks: Any, backend: Any, *arguments: Any, **named: Any
    ) -> Any:
        if str(backend) in GLOO_OR_DEFAULT:
            backend = dist.Backend(BACKEND)
        return original(size, rank, ranks, backend, *arguments, **named)

    distributed_c10d._new_process_group_helper = of_torch(
        distributed_c10d, _new_process_group_helper
    )


def use_device() -> None:
    """Make tensors and meshes on the device, except in forked children: they cannot use CUDA."""
    make_mesh, to_numpy = device_mesh.init_device_mesh, torch.Tensor.numpy

    def init_device_mesh(kind: str, *arguments: Any, **named: Any) -> Any:
        return make_mesh(DEVICE if kind == "cpu" else kind, *arguments, **named)

    @functools.wraps(to_numpy)
    def numpy(self: Any, *arguments: Any, **named: Any) -> Any:
        return to_numpy(self.cpu(), *arguments, **named)

    device_mesh.init_device_mesh = dist.init_device_mesh = of_torch(device_mesh, init_device_mesh)
    torch.Tensor.numpy = of_torch(torch, numpy)
    of_torch(_device, Everything.__torch_function__)
    context = Everything(DEVICE)
    context.__enter__()

    def make_on_cpu() -> None:
        context.device = torch.device("cpu")

    os.register_at_fork(after_in_child=make_on_cpu)


def start() -> None:
    """Prepare this rank."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(os.environ["TMPDIR"])
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        os.environ.update(one_gpu_for_all(int(os.environ["RANK"])))
        torch.cuda.set_device(0)
        torch.cuda.init()  # else a mesh would choose the device of the local rank
    use_backend()
    use_device()


start()
