"""Numbers that a program reads and that may decide something: run the ranks with others instead.

``float(loss)`` goes where it cannot be followed, mostly into a log. A rank that does the same with
very different numbers does not decide by them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from commlens.check.branches import Decision
from commlens.check.prediction import is_same
from commlens.check.processes import Ranks
from commlens.check.sequence import RankSequence

_NUMBERS = (0.0, math.inf, -math.inf, math.nan)


def vary(
    ranks: Ranks, sequences: Mapping[int, RankSequence], ran: Collection[int]
) -> dict[int, RankSequence]:
    """Return the sequences, in which decisions are marked that other numbers do not change.

    Args:
        ranks: what ran the program.
        sequences: of all ranks.
        ran: the ranks that were run. The others share their decisions with those they resemble.
    """
    same = {rank for rank in ran if any(map(_is_open, sequences[rank].decisions))}
    for number in _NUMBERS:
        if same:
            varied = ranks.again(number).run(same)
            same = {rank for rank in same if is_same(sequences[rank], varied[rank])}
    idle = {id(sequences[rank].decisions) for rank in same}
    return {
        rank: _marked(sequence) if id(sequence.decisions) in idle else sequence
        for rank, sequence in sequences.items()
    }


def _is_open(decision: Decision) -> bool:
    return decision.replaceable and decision.is_open


def _marked(sequence: RankSequence) -> RankSequence:
    decisions = [
        msgspec.structs.replace(each, idle=True) if each.replaceable else each
        for each in sequence.decisions
    ]
    return msgspec.structs.replace(sequence, decisions=decisions)
