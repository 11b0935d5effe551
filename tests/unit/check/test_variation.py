"""Tests of src/commlens/check/variation.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from commlens.check.branches import Decision
from commlens.check.sequence import RankSequence
from commlens.check.variation import vary
from commlens.model.collective import Frame

FLOAT = Decision(Frame("a.py", 1, "f"), "number", replaceable=True)
INT = Decision(Frame("a.py", 2, "f"), "number")


class Ranks:
    """Ranks whose exit code is what ``decide`` makes of the number that they read."""

    def __init__(self, decide: Callable[[int, float], int], number: float = 1.0) -> None:
        self.decide, self.number = decide, number
        self.tried: list[tuple[int, ...]] = []

    def again(self, number: float) -> Ranks:
        other = Ranks(self.decide, number)
        other.tried = self.tried
        return other

    def run(self, ranks: Iterable[int]) -> dict[int, RankSequence]:
        self.tried.append(tuple(sorted(ranks)))
        return {rank: self.sequence(rank) for rank in self.tried[-1]}

    def sequence(self, rank: int, *decisions: Decision) -> RankSequence:
        code = self.decide(rank, self.number)
        return RankSequence(rank, 4, exit_code=code, decisions=list(decisions))


def idle_after(ranks: Any, sequences: dict[int, RankSequence], ran: set[int]) -> dict[int, Any]:
    varied = vary(ranks, sequences, ran)
    return {rank: [each.idle for each in varied[rank].decisions] for rank in varied}


def test_a_number_that_changes_nothing_is_idle() -> None:
    ranks = Ranks(lambda rank, number: 0)
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
    ranks = Ranks(lambda rank, number: int(decisions[rank](number)))
    sequences = {rank: ranks.sequence(rank, FLOAT) for rank in range(4)}
    assert idle_after(ranks, sequences, set(range(4))) == {rank: [False] for rank in range(4)}


def test_ranks_that_were_not_run_go_with_the_one_they_resemble() -> None:
    ranks = Ranks(lambda rank, number: int(rank == 1 and number == 0))
    one, two = ranks.sequence(0, FLOAT), ranks.sequence(1, FLOAT)
    like_one = RankSequence(2, 4, decisions=one.decisions)
    like_two = RankSequence(3, 4, decisions=two.decisions)
    sequences = {0: one, 1: two, 2: like_one, 3: like_two}
    assert idle_after(ranks, sequences, {0, 1}) == {0: [True], 1: [False], 2: [True], 3: [False]}
