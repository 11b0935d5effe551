"""A preview on fake tensors: shapes and dtypes without memory, with every collective still issued. Tried on torch 2.6.0, 2.13.0, 2.15.0."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
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
from commlens.tracing import stacks
from commlens.tracing.patches import Patches

_CPU = DispatchKeySet(DispatchKey.CPU)
_AFTER = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
_NO_COLLECTIVES = ("wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "mesh_get_process_group")
_SCALAR = torch.ops.aten._local_scalar_dense.default


class PreviewTensors(FakeTensorMode):  # type: ignore[misc]
    """torch's FakeTensorMode, in which a value that the program asks for is made up, and said to be."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.made_up: dict[str, None] = {}  # lines that asked for values

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        if func is _SCALAR and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return func(*args)
        if func is _SCALAR:
            constant = getattr(args[0], "constant", None)
            return constant.item() if constant is not None else self._make_up(args[0])
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise CommandError(
                f"{func} at {_user_line() or 'an unknown line'} gives a result whose shape depends on values, and fake tensors have none: "
                "preview without --fake-tensors, with a smaller model if need be."
            ) from error

    def _make_up(self, tensor: torch.Tensor) -> Any:
        line = _user_line()
        if line:
            self.made_up[line] = None
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1


class FakeTensors:
    """Fake tensors in force, and what makes collectives work on them."""

    def __init__(self) -> None:
        self.mode = PreviewTensors()
        self._libraries: list[Any] = []

    def install(self, patches: Patches) -> None:
        """Everything but entering the mode."""
        import torch.distributed.device_mesh as device_mesh

        tap.run_fake_tensors_as(_CPU)
        _ignore_fake_kernel(patches, "_dtensor::shard_dim_alltoall")
        # Module.to swaps fake parameters, and refuses because the mode refers to them weakly: which does no harm here.
        patches.set(torch.utils, "weakref", types.SimpleNamespace(getweakrefs=lambda tensor: []))
        for namespace in ("_c10d_functional", "_dtensor"):
            self._run_functional_ops(namespace)
        # What DDP's reducer compares across ranks are small tensors, whose values are needed.
        patches.wrap(torch._C._distributed_c10d, "_verify_params_across_processes", really)
        patches.wrap(torch._C._distributed_c10d.Reducer, "_rebuild_buckets", really)
        # Which ranks are in which mesh is arithmetic on small tensors, whose values are needed.
        patches.wrap(device_mesh, "init_device_mesh", really)
        for name, method in list(vars(device_mesh.DeviceMesh).items()):
            if isinstance(method, types.FunctionType):
                patches.set(device_mesh.DeviceMesh, name, really(method))
            elif isinstance(method, staticmethod):
                patches.set(device_mesh.DeviceMesh, name, staticmethod(really(method.__func__)))

    def remove(self) -> None:
        """Leave dispatch as it was."""
        tap.run_fake_tensors_as(None)
        for library in self._libraries:
            library._destroy()
        self._libraries = []

    def _run_functional_ops(self, namespace: str) -> None:
        """Functional collectives have Meta kernels that issue nothing. Theirs for CPU work on any tensor, and issue the c10d op."""
        library = torch.library.Library(namespace, "IMPL")
        self._libraries.append(library)
        for schema in torch._C._jit_get_all_schemas():
            space, _, name = schema.name.partition("::")
            if space == namespace and not schema.overload_name and name not in _NO_COLLECTIVES:
                packet = getattr(getattr(torch.ops, namespace), name)
                library.impl(name, _functional_kernel(packet.default), "BackendSelect", with_keyset=True)


def _functional_kernel(op: Any) -> Callable[..., Any]:
    redispatch = op._handle.redispatch_boxed

    def commlens_preview(keys: Any, *arguments: Any) -> Any:
        return redispatch(_CPU if keys.has(DispatchKey.Meta) else keys & _AFTER, *arguments)

    return commlens_preview


def _ignore_fake_kernel(patches: Patches, name: str) -> None:
    """Some ops have a kernel for fake tensors in Python, which issues nothing."""
    from torch._library.simple_registry import singleton

    entry = singleton.find(name)
    if entry.fake_impl.kernel is not None:
        patches.set(entry, "fake_impl", types.SimpleNamespace(kernel=None))


def really(function: Any) -> Any:
    """The function on real tensors, whatever mode is in force."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return wrapper


def _user_line() -> str | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if stacks._kind_of(frame.f_code.co_filename) is FrameKind.USER:
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return None
