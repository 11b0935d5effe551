"""The sequences of all ranks of a world, judged: all ranks are run, or a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import msgspec

from commlens.check.classes import explore_classes
from commlens.check.judge import Checked
from commlens.check.prediction import is_same
from commlens.check.processes import RankProcesses
from commlens.check.sequence import RankSequence

ALL_UP_TO = 16
"""Worlds of this size are run whole: little would be saved."""

_CONFIRMATIONS = 3
_CONFIRMED_AT_ONCE = 32

_NUMBERS = (0.0, math.inf, -math.inf, math.nan)

Judge = Callable[[Mapping[int, RankSequence]], Checked]


def run_whole(ranks: RankProcesses, judge: Judge, world_size: int) -> Checked:
    """Run all ranks."""
    sequences = ranks.sequences_of(range(world_size))
    return _judged(ranks, judge, sequences, sequences)


def run_classes(
    ranks: RankProcesses, judge: Judge, world_size: int, ranks_per_node: int
) -> Checked | None:
    """Run a few ranks, and those that would be to blame for a fault. Return None if all must be
    run, since one waited for a key of the store, which a rank that was not run may write.
    """
    also = set[int]()
    for _ in range(_CONFIRMATIONS):
        classes = explore_classes(ranks.sequences_of, world_size, ranks_per_node, also)
        if ranks.waited_in_vain:
            return None
        checked = _judged(ranks, judge, classes.sequences, classes.ran)
        verdict = checked.verdict
        concerned = {*verdict.culprits[:_CONFIRMED_AT_ONCE], *verdict.victims[:1]}
        unproven = concerned - set(classes.ran)
        if not verdict.is_fault or not unproven:
            break
        also |= set(sorted(unproven)[:_CONFIRMED_AT_ONCE])
    if classes.surprising and verdict.kind == "healthy":
        doubted = msgspec.structs.replace(verdict, kind="undetermined", confidence="low")
        checked = checked.with_verdict(doubted)
    return checked._replace(classes=classes)


def _judged(
    ranks: RankProcesses, judge: Judge, sequences: Mapping[int, RankSequence], ran: Collection[int]
) -> Checked:
    """Judge the sequences. If it is only numbers that leave a fault open, try others."""
    checked = judge(sequences)
    return judge(vary(ranks, sequences, ran)) if checked.hinges_on_numbers else checked


def vary(
    ranks: RankProcesses, sequences: Mapping[int, RankSequence], ran: Collection[int]
) -> dict[int, RankSequence]:
    """Return the sequences, in which decisions are marked that other numbers do not change.

    Args:
        ranks: what ran the program.
        sequences: of all ranks.
        ran: the ranks that were run. The others share their decisions with those they resemble.
    """
    same = {
        rank
        for rank in ran
        if any(each.replaceable and each.is_open for each in sequences[rank].decisions)
    }
    for number in _NUMBERS:
        if same:
            varied = ranks.with_number(number).sequences_of(same)
            same = {rank for rank in same if is_same(sequences[rank], varied[rank])}
    idle = {id(sequences[rank].decisions) for rank in same}
    return {
        rank: msgspec.structs.replace(
            sequence,
            decisions=[
                msgspec.structs.replace(each, idle=True) if each.replaceable else each
                for each in sequence.decisions
            ],
        )
        if id(sequence.decisions) in idle
        else sequence
        for rank, sequence in sequences.items()
    }
