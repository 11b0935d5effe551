"""Collectives on fake tensors, in programs that run under torch's FakeTensorMode. They reach no
backend, so the tap does not see them.

``FakeTensorMode.dispatch`` is wrapped while a tracer runs. A compiler's own work on fake tensors is
not the program's, and is left out. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from commlens.model.ops import api_wire_op
from commlens.tap import tap
from commlens.tap.interned_args import InternedArgs, describe, describe_tensors
from commlens.tracing.attribution.op_names import functional_scope, public_packet
from commlens.tracing.patches import SharedPatch

Describe = Callable[[Any], tuple[InternedArgs, Any]]
"""Takes a tracer's groups. Returns a collective's arguments and its reduce op."""

Note = Callable[[str, Describe, FrameType | None], None]
"""Takes the op, a function that describes the collective, and the frame that called it."""


def _reporting_dispatch(original: Any) -> Any:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = original(self, func, types, args, kwargs or {})
        namespace = getattr(func, "namespace", "")
        if (
            namespace in ("c10d", "_c10d_functional", "_dtensor")
            and listeners.users
            and not getattr(self, "issues_collectives", False)
            and TracingContext.try_get() is None
        ):
            _report(func, args, kwargs or {}, result, sys._getframe(1))
        return result

    return dispatch


listeners = SharedPatch(FakeTensorMode, "dispatch", _reporting_dispatch)
"""Each user, a :data:`Note`, is called for every collective on fake tensors."""


def _report(func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType | None) -> None:
    scope, outer = functional_scope, functional_scope.packet
    if func.namespace == "c10d":
        spec = _specs().get(func)
        if spec is None:
            return
        name, describe_it = spec.name, functools.partial(_describe_c10d, spec, args)
    else:
        names = [argument.name for argument in func._schema.arguments]
        if "group_name" not in names:
            return
        name = func._schema.name.partition("::")[2]
        describe_it = functools.partial(
            _describe_functional,
            name,
            dict(zip(names, args, strict=False)) | kwargs,
            args,
            result,
        )
        scope.packet = public_packet(func._overloadpacket)
    try:
        for note in listeners.users:
            note(name, describe_it, frame)
    finally:
        scope.packet = outer


@functools.cache
def _specs() -> dict[Any, tap.OpSpec]:
    return dict(tap.ops())


def _describe_c10d(spec: tap.OpSpec, arguments: Any, groups: Any) -> tuple[InternedArgs, Any]:
    group = groups.find(tap.unbox_group(arguments[spec.process_group]))
    return describe(spec, arguments, group), (
        arguments[spec.reduce_op] if spec.reduce_op >= 0 else None
    )


def _describe_functional(
    name: str, given: dict[str, Any], arguments: Any, result: Any, groups: Any
) -> tuple[InternedArgs, Any]:
    group = groups.find(c10d._resolve_process_group(given["group_name"]))
    inputs, device = describe_tensors(arguments[0])
    outputs, _ = describe_tensors(result)
    root, reduce_op = given.get("src"), given.get("reduce_op")
    content = {
        "k": "asked",
        "op": api_wire_op(name),
        "dop": name,
        "in": inputs,
        "out": outputs,
        "rop": None,
        "root": None if root is None else group.global_rank(int(root)),
        "is": [],
        "os": [],
        "async": True,
    }
    return InternedArgs(content, group.channel(device)), (
        None if reduce_op is None else str(reduce_op).upper()
    )
