"""The bytes that a collective moves through one rank's link, in one direction.

By the ring algorithm (the bus bytes of nccl-tests), with n ranks: all_reduce 2(n-1)/n of the input;
all_gather (n-1)/n of the output; reduce_scatter, all_to_all (n-1)/n of the input; gather, scatter
(n-1)/n of the root's data, on every rank; broadcast, reduce, send, recv all of it; barriers
nothing.
"""

from __future__ import annotations

from typing import Final

from commlens.model.ops import BARRIERS, POINT_TO_POINT

RULE_IN_SHORT: Final = "through one rank's link in one direction, by the ring algorithm"


def wire_bytes(op: str, world_size: int, input_bytes: int, output_bytes: int) -> int:
    """Return the bytes through one rank's link in one direction, rounded down; 0 for a group of one
    rank and for ops without data.

    In-place ops (all_reduce, broadcast) contribute as many input bytes as they receive. Only the
    root of a gather has output, and only that of a scatter has input; for the other ranks, all
    parts are taken to be as large as their own.
    """
    if world_size <= 1 or op in BARRIERS:
        return 0
    if op in POINT_TO_POINT or op in ("broadcast", "reduce"):
        return max(input_bytes, output_bytes)
    if op == "gather":
        whole = output_bytes or world_size * input_bytes
    elif op == "scatter":
        whole = input_bytes or world_size * output_bytes
    elif op == "all_gather":
        whole = output_bytes
    elif op in ("reduce_scatter", "all_to_all"):
        whole = input_bytes
    else:
        whole = max(input_bytes, output_bytes)
    return (2 if op == "all_reduce" else 1) * whole * (world_size - 1) // world_size
