"""Map a collective to the op packet under which it is counted: the one by which users of
CommDebugMode look it up, such as ``torch.ops.c10d_functional.all_reduce``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from commlens.tracing.raw_event import RawEvent

FUNCTIONAL = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


class _FunctionalScope(threading.local):
    """The functional op that a dispatch mode runs now on this thread."""

    packet: Any = None


functional_scope = _FunctionalScope()


def counted_packet(event: RawEvent) -> Any:
    """Return the packet under which to count a collective: the packet of its functional op if it
    has one, else of its ``c10d`` op.
    """
    if event.functional is not None:
        return event.functional
    if event.info.packet is not None:
        namespace, _, name = event.info.packet.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            return public_packet(packet)
    return getattr(torch.ops.c10d, event.dispatcher_op)


def public_packet(packet: Any) -> Any:
    """Map ``_c10d_functional.all_reduce``, ``.all_reduce_`` and the autograd form to
    ``c10d_functional.all_reduce``.

    In-place and ``out`` forms, which compiled code prefers, count as the same collective. Other
    packets are returned as they are.
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
    """Return an operator's namespace and name."""
    namespace, _, name = str(packet).partition(".")
    return namespace, name


@functools.cache
def collective_packets() -> frozenset[Any]:
    """Return the packets of this torch's functional collectives, native and public, and of
    DTensor's own collective.
    """
    known: set[Any] = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "_c10d_functional" and any(
            argument.name == "group_name" for argument in schema.arguments
        ):
            packet = getattr(torch.ops._c10d_functional, name)
            known |= {packet, public_packet(packet)}
    known.add(torch.ops._dtensor.shard_dim_alltoall)
    return frozenset(known)
