"""The pace of the ranks of several nodes."""

from __future__ import annotations

import pytest
from paced_jobs import job
from paced_samples import late, samples

from commlens.speed.pace import condensed, judge


@pytest.mark.parametrize("per_node", [1, 2])
def test_the_ranks_of_several_nodes_are_compared(per_node: int) -> None:
    """Each node measures its own ranks' waits on its own clock; the second node's is an hour
    behind.
    """
    before = None
    for compute, slow in (
        (late, [2]),
        (lambda rank, step: 108.0 if rank == 2 else 100.0, [2]),
        (lambda rank, step: 100.0, None),
    ):
        logs = job(4, 400, compute)
        nodes = [logs[first : first + per_node] for first in range(0, 4, per_node)]
        paces = [condensed(samples(node, least=1)) for node in nodes]
        before = judge(paces, before)
        assert before is not None and before.ranks == [0, 1, 2, 3]
        assert (before.slow.ranks if before.slow is not None else None) == slow, (
            "half the cost suffices to remain slow"
        )


def test_nodes_that_wait_for_each_other_unseen_are_not_compared() -> None:
    for how in ("cpp", "unseen"):
        logs = job(4, 400, late, how=how)
        assert bool(condensed(samples(logs[:2]))) is (how == "cpp")
        found = judge([condensed(samples(logs[:2])), condensed(samples(logs[2:]))], None)
        assert (found.slow.ranks if found and found.slow else None) == (
            [2] if how == "cpp" else None
        )
