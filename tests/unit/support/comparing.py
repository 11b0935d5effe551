"""Compares the collectives that ranks issue."""

from __future__ import annotations

from commlens.matching.answer import Answer
from commlens.matching.collectives import compare_collectives
from commlens.model.collective import CollectiveArgs


def odd_one(usual: CollectiveArgs, odd: CollectiveArgs) -> Answer:
    """Compare those of four ranks, of which rank 2 is the odd one."""
    return compare_collectives({rank: odd if rank == 2 else usual for rank in range(4)}, range(4))
