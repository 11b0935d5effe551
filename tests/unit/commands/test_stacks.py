"""``commlens stacks`` of a job of which a few ranks stand for the others."""

from __future__ import annotations

from commlens.commands.stacks import with_alike
from commlens.diagnosis.fold.alike import Alike, AlikeRanks
from commlens.model.stack_classes import StackClass
from commlens.watch.other_nodes import OtherNodes


def test_ranks_that_were_not_read_stand_where_those_in_their_state_do() -> None:
    alike = AlikeRanks(
        [
            Alike(frozenset([0, 1]), frozenset([2, 3, 4])),
            Alike(frozenset([6]), frozenset()),
            Alike(frozenset(), frozenset([8])),
        ]
    )
    classes = [StackClass([0, 1, 6], ()), StackClass([7], (), "stopped"), StackClass([9], ())]
    assert [each.ranks for each in with_alike(classes, OtherNodes(alike=alike))] == [
        [7],
        [9],
        [0, 1, 2, 3, 4, 6],
    ]
