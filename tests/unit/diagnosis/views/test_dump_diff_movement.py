"""The progress between two dumps."""

from __future__ import annotations

from commlens.diagnosis.views.dump_diff import Moved, Movement


def test_it_is_true_if_a_rank_made_progress() -> None:
    still, moved = Moved([0, 1], "still", "they stand"), Moved([2], "moved", "it moved")
    assert not Movement() and not Movement(ranks=[still])
    assert Movement(ranks=[still, moved])
