"""Run all ranks of a world, or a few of each class, and judge their sequences.

A verdict may be open only because the program read a number that one rank alone cannot know, such
as a loss that it logs. Then the ranks run again with very different numbers in its place: if they
issue the same collectives each time, the number decides nothing.
"""

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

# A rank is blamed only if it was run: the most rounds of such runs, and the most ranks in one.
_CONFIRMATIONS = 3
_CONFIRMED_AT_ONCE = 32

_NUMBERS = (0.0, math.inf, -math.inf, math.nan)
"""Read in place of floats that cannot be followed: most comparisons turn out otherwise by one."""

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
    return judge(mark_idle(ranks, sequences, ran)) if checked.hinges_on_numbers else checked


def mark_idle(
    ranks: RankProcesses, sequences: Mapping[int, RankSequence], ran: Collection[int]
) -> dict[int, RankSequence]:
    """Return the sequences, with a mark on the reads of numbers that decide nothing: with other
    numbers, the rank did the same.

    Args:
        ranks: the processes that ran the program.
        sequences: of all ranks.
        ran: the ranks that were run. A predicted sequence shares its list of decisions with the
            sequence of the rank after which it was made.
    """
    unaffected = {
        rank
        for rank in ran
        if any(each.replaceable and each.is_open for each in sequences[rank].decisions)
    }
    for number in _NUMBERS:
        if unaffected:
            varied = ranks.with_number(number).sequences_of(unaffected)
            unaffected = {rank for rank in unaffected if is_same(sequences[rank], varied[rank])}
    idle = {id(sequences[rank].decisions) for rank in unaffected}
    marked = dict(sequences)
    for rank, sequence in sequences.items():
        if id(sequence.decisions) in idle:
            decisions = [
                msgspec.structs.replace(each, idle=True) if each.replaceable else each
                for each in sequence.decisions
            ]
            marked[rank] = msgspec.structs.replace(sequence, decisions=decisions)
    return marked
