"""Names of collectives: the dispatcher's, torch's recorder's and ours.

Ranks that call different forms of one collective (``all_gather`` into a list on one, into a tensor on
another) meet on the wire, so they are compared by their *wire op*, the canonical name used here.
The dispatcher's names are those of ``c10d::*`` in torch 2.6 to 2.15.
"""

from __future__ import annotations

from typing import Final

WIRE_OPS: Final[dict[str, str]] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "gather_into_tensor_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
"""Dispatcher name (without ``c10d::``) to wire op."""

POINT_TO_POINT: Final = frozenset({"send", "recv"})
"""Wire ops between two ranks: matched by pair, never by the group's sequence number."""

ROOTED: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Wire ops with a root, which some ranks may legally leave before others have arrived."""

REDUCING: Final = frozenset({"all_reduce", "reduce", "reduce_scatter"})
"""Wire ops that take a reduce op."""


def wire_op(dispatcher_name: str) -> str:
    """The canonical name of a ``c10d`` op; an op nobody knows yet keeps its own name, without underscores at its ends."""
    name = dispatcher_name.removeprefix("c10d::").split(".")[0]
    return WIRE_OPS.get(name, name.strip("_"))


def matches_by_tag(backend: str) -> bool:
    """Return whether a backend pairs messages by tag, in any order, as gloo does.

    NCCL and its relatives (RCCL, XCCL, HCCL, ...) ignore tags: the first send meets the first receive.
    """
    return "ccl" not in backend
