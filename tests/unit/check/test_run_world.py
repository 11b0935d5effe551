"""Tests of src/commlens/check/run_world.py."""

from __future__ import annotations

from typing import Any

import pytest
from sequences import Player, play

from commlens.check.judge import judge
from commlens.check.run_world import run_classes, run_whole
from commlens.check.sequence import RankSequence

WORLD = 64


class Ranks:
    """Ranks of a known program, in place of processes."""

    waited_in_vain = False

    def __init__(self, odd: int | None = None) -> None:
        def program(rank: Player) -> None:
            rank.collective("broadcast" if rank.rank == odd else "all_reduce", root=None)

        self.truth = play(WORLD, program)
        self.ran: set[int] = set()

    def run(self, ranks: Any) -> dict[int, RankSequence]:
        self.ran |= set(ranks)
        return {rank: self.truth[rank] for rank in ranks}


def test_all_ranks_are_run_of_a_world_that_is_run_whole() -> None:
    ranks: Any = Ranks(odd=5)
    world = run_whole(ranks, judge, WORLD)
    assert world.classes is None
    assert ranks.ran == set(range(WORLD))
    assert world.checked.verdict.culprits == [5]


def test_few_ranks_are_run_where_all_do_the_same() -> None:
    ranks: Any = Ranks()
    world = run_classes(ranks, judge, WORLD, 8)
    assert world is not None
    assert world.classes is not None
    assert len(ranks.ran) < WORLD // 2
    assert len(world.sequences) == WORLD
    assert not world.checked.verdict.is_fault


@pytest.mark.parametrize("odd", [0, 63])
def test_the_ranks_to_blame_were_run(odd: int) -> None:
    ranks: Any = Ranks(odd)
    world = run_classes(ranks, judge, WORLD, 8)
    assert world is not None
    verdict = world.checked.verdict
    assert verdict.culprits == [odd]
    assert {odd, verdict.victims[0]} <= ranks.ran


def test_a_key_that_nobody_wrote_needs_all_ranks() -> None:
    ranks: Any = Ranks()
    ranks.waited_in_vain = True
    assert run_classes(ranks, judge, WORLD, 8) is None


def test_ranks_that_do_something_unexpected_leave_a_healthy_world_undetermined() -> None:
    def program(rank: Player) -> None:
        if rank.rank * 7919 % 101 % 3 == 0:
            rank.store("store.set", f"key{rank.rank * 7919 % 101}")
        rank.collective()

    ranks: Any = Ranks()
    ranks.truth = play(1024, program)
    world = run_classes(ranks, judge, 1024, 8)
    assert world is not None and world.classes is not None
    assert world.classes.surprising
    assert world.checked.verdict.kind == "undetermined"
