"""Fake tensors in a preview: no memory, but every collective is still issued. Tried on torch 2.6.0,
2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from commlens.errors import CommandError
from commlens.model.collective import FrameKind
from commlens.tap import tap
from commlens.tap.running_frames import user_frame
from commlens.tracing.patches import Patches

_CPU = DispatchKeySet(DispatchKey.CPU)
_AFTER_SELECT = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
_NO_COLLECTIVES = ("wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "mesh_get_process_group")
_SCALAR = torch.ops.aten._local_scalar_dense.default
_COMPARISONS = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
READS = (_SCALAR, *_COMPARISONS)
"""The ops that give a program a value of a tensor."""


class PreviewTensors(FakeTensorMode):  # type: ignore[misc]
    """torch's FakeTensorMode, but it invents the values that the program reads, and records the
    lines that read them.
    """

    issues_collectives = True
    """Collectives on its tensors reach the tap, so ``tracing/fake_tensors.py`` must not report them
    again.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.invented_at: dict[str, None] = {}  # lines that read values

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        if func is _SCALAR and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args)
        if func is _SCALAR:
            constant = getattr(args[0], "constant", None)
            return constant.item() if constant is not None else self._invent(args[0].dtype)
        if func in _COMPARISONS:
            return self._invent(torch.bool)
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise CommandError(
                f"The shape of the result of {func} at {_user_line() or 'an unknown line'} depends"
                " on values, which fake tensors lack: preview without --fake-tensors, if necessary"
                " with a smaller model."
            ) from error

    def _invent(self, dtype: torch.dtype) -> Any:
        """Return a value of this type, and note the user's line that reads it."""
        line = _user_line()
        if line:
            self.invented_at[line] = None
        if dtype is torch.bool:
            return False
        return 1.0 if dtype.is_floating_point else 1


class FakeTensors:
    """Fake tensors, and the patches that let collectives work on them."""

    def __init__(self) -> None:
        self.mode = PreviewTensors()
        self._libraries: list[Any] = []

    def install(self, patches: Patches) -> None:
        """Install everything except the mode itself."""
        import torch.distributed.device_mesh as device_mesh

        tap.run_fake_tensors_as(_CPU)
        entry = singleton.find("_dtensor::shard_dim_alltoall")
        if entry.fake_impl.kernel is not None:  # it issues nothing
            patches.set(entry, "fake_impl", types.SimpleNamespace(kernel=None))
        # Module.to refuses to swap fake parameters because the mode has weak references to them,
        # which is harmless here.
        patches.set(torch.utils, "weakref", types.SimpleNamespace(getweakrefs=lambda tensor: []))
        for namespace in ("_c10d_functional", "_dtensor"):
            self._run_functional_ops(namespace)
        patches.wrap(torch.Tensor, "__format__", _format)
        # DDP's reducer compares small tensors across ranks and needs their values.
        patches.wrap(
            torch._C._distributed_c10d, "_verify_params_across_processes", run_on_real_tensors
        )
        patches.wrap(torch._C._distributed_c10d.Reducer, "_rebuild_buckets", run_on_real_tensors)
        # Meshes compute their ranks with small tensors and need their values.
        patches.wrap(device_mesh, "init_device_mesh", run_on_real_tensors)
        for name, method in list(vars(device_mesh.DeviceMesh).items()):
            if isinstance(method, (types.FunctionType, staticmethod)):
                patches.wrap(device_mesh.DeviceMesh, name, run_on_real_tensors)

    def remove(self) -> None:
        """Restore dispatch."""
        tap.run_fake_tensors_as(None)
        for library in self._libraries:
            library._destroy()
        self._libraries = []

    def _run_functional_ops(self, namespace: str) -> None:
        """Let functional collectives on Meta tensors issue the c10d op."""
        library = torch.library.Library(namespace, "IMPL")
        self._libraries.append(library)
        for schema in torch._C._jit_get_all_schemas():
            space, _, name = schema.name.partition("::")
            if space == namespace and not schema.overload_name and name not in _NO_COLLECTIVES:
                packet = getattr(getattr(torch.ops, namespace), name)
                library.impl(
                    name, _functional_kernel(packet.default), "BackendSelect", with_keyset=True
                )


def _functional_kernel(op: Any) -> Callable[..., Any]:
    redispatch = op._handle.redispatch_boxed

    def commlens_preview(keys: Any, *arguments: Any) -> Any:
        return redispatch(_CPU if keys.has(DispatchKey.Meta) else keys & _AFTER_SELECT, *arguments)

    return commlens_preview


def run_on_real_tensors(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function on real tensors, in any mode."""
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def _format(original: Any, tensor: torch.Tensor, spec: str) -> str:
    """Format a fake number like the number in its place: torch refuses to format it."""
    if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
        return format(tensor.item(), spec)
    return str(original(tensor, spec))


def _user_line() -> str | None:
    frame = user_frame(sys._getframe())
    return frame.where if frame is not None and frame.kind is FrameKind.USER else None
