"""Which operator stands for a collective, as CommDebugMode's users name it in their tests."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from commlens.tracing.tracer import RawEvent

FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def key_of(event: RawEvent) -> Any:
    """The packet under which a collective is counted: its functional op where there is one, else its ``c10d`` op."""
    if event.functional is not None:
        return event.functional
    if event.info.packet is not None:
        namespace, _, name = event.info.packet.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            return public_packet(packet)
    return getattr(torch.ops.c10d, event.dispatcher_op)


def public_packet(packet: Any) -> Any:
    """``c10d_functional.all_reduce`` for ``_c10d_functional.all_reduce``, ``.all_reduce_`` and the autograd form; others as they are.

    In-place and ``out`` forms, which compiled code prefers, are the same collective: they count with it.
    """
    namespace, name = split_name(packet)
    if namespace not in FUNCTIONAL:
        return packet
    for candidate in (name, name.removesuffix("_"), name.removesuffix("_out")):
        public = getattr(torch.ops.c10d_functional, candidate, None)
        if public is not None:
            return public
    return packet


def split_name(packet: Any) -> tuple[str, str]:
    """Namespace and name of an operator."""
    namespace, _, name = str(packet).partition(".")
    return namespace, name


@functools.cache
def registry() -> frozenset[Any]:
    """The functional collectives that this torch has, native and public, and DTensor's own."""
    known: set[Any] = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "_c10d_functional" and any(argument.name == "group_name" for argument in schema.arguments):
            packet = getattr(torch.ops._c10d_functional, name)
            known |= {packet, public_packet(packet)}
    known.add(torch.ops._dtensor.shard_dim_alltoall)
    return frozenset(known)
