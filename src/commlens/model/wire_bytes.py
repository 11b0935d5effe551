"""The bytes that a collective moves through one rank's link, in one direction.

By the ring algorithm (the bus bytes of nccl-tests), with n ranks: all_reduce 2(n-1)/n of the input; all_gather (n-1)/n of the output;
reduce_scatter, all_to_all (n-1)/n of the input; gather, scatter (n-1)/n of what the root holds; broadcast, reduce, send, recv all of it;
barriers nothing.
"""

from __future__ import annotations

from typing import Final

from commlens.model.ops import BARRIERS, POINT_TO_POINT

RULE_IN_SHORT: Final = "through one rank's link in one direction, by the ring algorithm"


def wire_bytes(op: str, world_size: int, input_bytes: int, output_bytes: int) -> int:
    """Return the bytes through one rank's link in one direction, rounded down; 0 for a group of one rank and for ops without data.

    In-place ops (all_reduce, broadcast) contribute as many input bytes as they receive.
    """
    if world_size <= 1:
        return 0
    larger = max(input_bytes, output_bytes)
    if op in POINT_TO_POINT or op in ("broadcast", "reduce"):
        return larger
    if op in BARRIERS:
        return 0
    rounds = 2 if op == "all_reduce" else 1
    return rounds * larger * (world_size - 1) // world_size
