"""Find the slow ranks of a job on several nodes: each node publishes how long its ranks wait, and
the node that reports compares all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlens.speed.pace import Pace, Slow, find_slow_ranks, of_all_nodes

Sample = tuple[int, float, dict[int, int]]
"""Steps; seconds per step; by rank, the per mille of the time in collectives."""


class Judgement(NamedTuple):
    """The slow ranks of the job, as found by the node that reports."""

    slow: Slow | None  # None: no rank is slow
    ranks: list[int]  # all ranks that were compared


def packed(paces: Sequence[Pace]) -> list[Sample]:
    """Return a node's samples in the form that is stored for the other nodes."""
    return [
        (
            pace.steps,
            round(pace.step_s, 6),
            {rank: round(1000 * waited / pace.window_s) for rank, waited in pace.waited_s.items()},
        )
        for pace in paces
    ]


def judge(nodes: Sequence[Sequence[Sample]], before: Judgement | None) -> Judgement | None:
    """Compare the ranks of all nodes of a job.

    Args:
        nodes: each node's samples, as many of each.
        before: the last judgement.

    Returns:
        None if a node has not published enough samples: then each node judges its own ranks.
    """
    if not all(nodes) or len({len(samples) for samples in nodes}) > 1:
        return None
    paces = of_all_nodes([[_unpacked(sample) for sample in samples] for samples in nodes])
    slow = find_slow_ranks(paces, before.slow if before is not None else None, sufficient=True)
    return Judgement(slow, sorted(rank for samples in nodes for rank in samples[0][2]))


def _unpacked(sample: Sample) -> Pace:
    steps, step_s, per_mille = sample
    return Pace(1.0, steps, {rank: share / 1000 for rank, share in per_mille.items()}, step_s)
