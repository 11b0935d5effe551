"""The sequences of all ranks of a world, of which all are run, or a few."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from commlens.check.classes import Classes, explore_classes
from commlens.check.judge import Checked
from commlens.check.processes import Ranks
from commlens.check.sequence import RankSequence
from commlens.check.variation import vary

ALL_UP_TO = 16
"""Worlds of this size are run whole: little would be saved."""

_CONFIRMATIONS = 3
_CONFIRMED_AT_ONCE = 32

Judge = Callable[[dict[int, RankSequence]], Checked]


class World(NamedTuple):
    """The sequences of all ranks, and the verdict on them."""

    sequences: dict[int, RankSequence]
    checked: Checked
    classes: Classes | None = None
    """None if all ranks were run."""


def run_whole(ranks: Ranks, judge: Judge, world_size: int) -> World:
    """Run all ranks."""
    sequences = ranks.run(range(world_size))
    return World(*_judged(ranks, judge, sequences, sequences))


def run_classes(ranks: Ranks, judge: Judge, world_size: int, ranks_per_node: int) -> World | None:
    """Run a few ranks, and those that would be to blame for a fault. Return None if all must be
    run, since one waited for a key of the store, which a rank that was not run may write.
    """
    also: set[int] = set()
    for _ in range(_CONFIRMATIONS):
        classes = explore_classes(ranks.run, world_size, ranks_per_node, also)
        if ranks.waited_in_vain:
            return None
        sequences, checked = _judged(ranks, judge, classes.sequences, classes.ran)
        unproven = _concerned(checked) - set(classes.ran)
        if not checked.verdict.is_fault or not unproven:
            break
        also |= set(sorted(unproven)[:_CONFIRMED_AT_ONCE])
    if classes.surprising and checked.verdict.kind == "healthy":
        doubted = msgspec.structs.replace(checked.verdict, kind="undetermined", confidence="low")
        checked = checked._replace(verdict=doubted)
    return World(sequences, checked, classes)


def _judged(
    ranks: Ranks, judge: Judge, sequences: dict[int, RankSequence], ran: Collection[int]
) -> tuple[dict[int, RankSequence], Checked]:
    """Judge the sequences. If it is only numbers that leave a fault open, try others."""
    checked = judge(sequences)
    if checked.hinges_on_numbers:
        sequences = vary(ranks, sequences, ran)
        checked = judge(sequences)
    return sequences, checked


def _concerned(checked: Checked) -> set[int]:
    """Return the ranks to blame, and the first of those that wait for them."""
    verdict = checked.verdict
    return {*verdict.culprits[:_CONFIRMED_AT_ONCE], *verdict.victims[:1]}
