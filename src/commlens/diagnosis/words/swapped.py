"""Words about a rank that issued collectives in another order than the others."""

from __future__ import annotations

from collections.abc import Iterable

from commlens.diagnosis.causes.swapped import FoundSwapped
from commlens.diagnosis.words.finding import Words
from commlens.model.collective import Collective
from commlens.text import capital, frame_phrase, group_phrase, ranks_phrase

_SHOWN = 4  # lines


def words(found: FoundSwapped) -> Words:
    """Return what a finding says about a rank that issued collectives in another order."""
    cause, swap, first = found.cause, found.swap, found.op
    where = f"{first.op} #{cause.first} to #{cause.last} of {group_phrase(first.channel.group)}"
    line = frame_phrase(first.source)
    return Words(
        summary=(
            f"rank {swap.rank} issued {where} in another order than the others: its collective at"
            f" {line} met the others' collective at {frame_phrase(swap.others[0].source)},"
            " so their results are mixed up"
        ),
        explanation=(
            f"Rank {swap.rank}: {_lines(swap.own)}. {capital(ranks_phrase(cause.victims))}:"
            f" {_lines(swap.others)}."
            " Ops and shapes are the same, so nothing hangs."
        ),
        next_step=f"find out why rank {swap.rank} reaches {line} first here",
        would_raise_confidence=(
            "Only the source lines show it: the program may issue them in either order on purpose."
        ),
    )


def _lines(ops: Iterable[Collective]) -> str:
    return ", ".join(frame_phrase(op.source) for op in list(ops)[:_SHOWN])
