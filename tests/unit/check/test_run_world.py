"""Tests of src/commlens/check/run_world.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from sequences import Player, play

from commlens.check.branches import BranchLine
from commlens.check.judge import judge
from commlens.check.run_world import mark_idle, run_classes, run_whole
from commlens.check.sequence import RankSequence
from commlens.model.collective import Frame

WORLD = 64


class Ranks:
    """Ranks of a known program, in place of processes."""

    waited_in_vain = False

    def __init__(self, odd: int | None = None) -> None:
        def program(rank: Player) -> None:
            rank.collective("broadcast" if rank.rank == odd else "all_reduce", root=None)

        self.truth = play(WORLD, program)
        self.ran: set[int] = set()

    def sequences_of(self, ranks: Any) -> dict[int, RankSequence]:
        self.ran |= set(ranks)
        return {rank: self.truth[rank] for rank in ranks}


def test_all_ranks_are_run_of_a_world_that_is_run_whole() -> None:
    ranks: Any = Ranks(odd=5)
    world = run_whole(ranks, judge, WORLD)
    assert world.classes is None
    assert ranks.ran == set(range(WORLD))
    assert world.verdict.culprits == [5]


def test_few_ranks_are_run_where_all_do_the_same() -> None:
    ranks: Any = Ranks()
    world = run_classes(ranks, judge, WORLD, 8)
    assert world is not None
    assert world.classes is not None
    assert len(ranks.ran) < WORLD // 2
    assert len(world.sequences) == WORLD
    assert not world.verdict.is_fault


@pytest.mark.parametrize("odd", [0, 63])
def test_the_ranks_to_blame_were_run(odd: int) -> None:
    ranks: Any = Ranks(odd)
    world = run_classes(ranks, judge, WORLD, 8)
    assert world is not None
    verdict = world.verdict
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
    assert world.verdict.kind == "undetermined"


FLOAT = BranchLine(Frame("a.py", 1, "f"), "number", replaceable=True)
INT = BranchLine(Frame("a.py", 2, "f"), "number")


class NumberedRanks:
    """Ranks whose exit code is what ``decide`` makes of the number that they read."""

    def __init__(self, decide: Callable[[int, float], int], number: float = 1.0) -> None:
        self.decide, self.number = decide, number
        self.tried: list[tuple[int, ...]] = []

    def with_number(self, number: float) -> NumberedRanks:
        other = NumberedRanks(self.decide, number)
        other.tried = self.tried
        return other

    def sequences_of(self, ranks: Iterable[int]) -> dict[int, RankSequence]:
        self.tried.append(tuple(sorted(ranks)))
        return {rank: self.sequence(rank) for rank in self.tried[-1]}

    def sequence(self, rank: int, *decisions: BranchLine) -> RankSequence:
        code = self.decide(rank, self.number)
        return RankSequence(rank, 4, exit_code=code, decisions=list(decisions))


def idle_after(ranks: Any, sequences: dict[int, RankSequence], ran: set[int]) -> dict[int, Any]:
    varied = mark_idle(ranks, sequences, ran)
    return {rank: [each.idle for each in varied[rank].decisions] for rank in varied}


def test_a_number_that_changes_nothing_is_idle() -> None:
    ranks = NumberedRanks(lambda rank, number: 0)
    sequences = {0: ranks.sequence(0, FLOAT, INT), 1: ranks.sequence(1, INT)}
    assert idle_after(ranks, sequences, {0, 1}) == {0: [True, False], 1: [False]}
    assert ranks.tried == [(0,)] * 4


def test_a_number_that_decides_stays_open() -> None:
    decisions: list[Callable[[float], bool]] = [
        lambda number: number == 0,
        lambda number: number > 1000,
        lambda number: number < -1000,
        math.isnan,
    ]
    ranks = NumberedRanks(lambda rank, number: int(decisions[rank](number)))
    sequences = {rank: ranks.sequence(rank, FLOAT) for rank in range(4)}
    assert idle_after(ranks, sequences, set(range(4))) == {rank: [False] for rank in range(4)}


def test_ranks_that_were_not_run_go_with_the_one_they_resemble() -> None:
    ranks = NumberedRanks(lambda rank, number: int(rank == 1 and number == 0))
    one, two = ranks.sequence(0, FLOAT), ranks.sequence(1, FLOAT)
    like_one = RankSequence(2, 4, decisions=one.decisions)
    like_two = RankSequence(3, 4, decisions=two.decisions)
    sequences = {0: one, 1: two, 2: like_one, 3: like_two}
    assert idle_after(ranks, sequences, {0, 1}) == {0: [True], 1: [False], 2: [True], 3: [False]}
