"""Ranks of a running job that issued collectives of one shape in another order than the others."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.align.swapped_order import SwappedOrder, find_swapped_orders
from commlens.diagnosis.causes.context import group_of, source_of
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import Swapped
from commlens.model.collective import ChannelKey, Collective


@dataclass
class FoundSwapped:
    """A rank that swapped collectives, and the evidence."""

    cause: Swapped
    swap: SwappedOrder

    @property
    def op(self) -> Collective:
        """The first of the rank's collectives."""
        return self.swap.own[0]


def find_swapped(job: JobIndex, key: ChannelKey) -> list[FoundSwapped]:
    """Return the ranks that issued collectives of a channel in another order."""
    return [FoundSwapped(_cause(job, key, swap), swap) for swap in find_swapped_orders(job, key)]


def _cause(job: JobIndex, key: ChannelKey, swap: SwappedOrder) -> Swapped:
    return Swapped(
        kind="mismatch/op",
        why="in-collective",
        root_cause=True,
        culprits=[swap.rank],
        blamed_by="majority" if len(job.tracks_on(key)) > 2 else "routine",
        victims=[rank for rank in sorted(job.users[key]) if rank != swap.rank],
        confidence="medium",
        group=group_of(swap.own[0]),
        first=swap.number,
        last=swap.number + len(swap.own) - 1,
        own=[source_of(op) for op in swap.own],
        others=[source_of(op) for op in swap.others],
    )
