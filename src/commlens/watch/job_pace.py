"""Which ranks of a job on several nodes make it slow: each node tells the share of the time that its ranks wait, one compares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlens.diagnosis.pace import MIN_COST, Pace, Slow, find_slow_ranks, of_all_nodes

Sample = tuple[int, float, dict[int, int]]
"""Steps; seconds per step; by rank, the per mille of the time in collectives."""


class Judgement(NamedTuple):
    """What the node that reports has found."""

    slow: Slow | None
    ranks: list[int]  # that it has compared


def packed(paces: Sequence[Pace]) -> list[Sample]:
    """Return a node's samples as they travel."""
    return [
        (pace.steps, round(pace.step_s, 6), {rank: round(1000 * waited / pace.window_s) for rank, waited in pace.waited_s.items()})
        for pace in paces
    ]


def judge(nodes: Sequence[Sequence[Sample]], before: Judgement | None) -> Judgement | None:
    """Compare the ranks of all nodes of a job.

    Args:
        nodes: each node's samples, as many of each.
        before: the last judgement: of ranks that were slow, half the cost suffices to remain so.

    Returns:
        None if not every node has told, so that each judges its own ranks.
    """
    if not all(nodes) or len({len(samples) for samples in nodes}) > 1:
        return None
    paces = of_all_nodes([[_unpacked(sample) for sample in samples] for samples in nodes])
    slow = find_slow_ranks(paces, sufficient=True)
    if (
        slow is None
        and before is not None
        and before.slow is not None
        and find_slow_ranks(paces, MIN_COST / 2, sufficient=True) is not None
    ):
        slow = before.slow
    return Judgement(slow, sorted(rank for samples in nodes for rank in samples[0][2]))


def _unpacked(sample: Sample) -> Pace:
    steps, step_s, per_mille = sample
    return Pace(1.0, steps, {rank: share / 1000 for rank, share in per_mille.items()}, step_s)
