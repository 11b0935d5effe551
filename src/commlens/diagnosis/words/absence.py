"""Phrases about ranks that others wait for, whether they work or are missing."""

from __future__ import annotations

from collections import defaultdict

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.missing import Absence
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.activities import sign_words
from commlens.text import capital, joined, ranks_phrase, verb


def waits(context: Context, absence: Absence) -> list[str]:
    """Return sentences about the ranks that wait: in the representative's collective, elsewhere,
    and behind these.
    """
    them = verb(absence.ranks, "it", "them")
    others = phrases.waits(context, absence.elsewhere, f"waits for {them}", f"wait for {them}")
    direct = {*absence.waiting, *(edge.rank for edge in absence.elsewhere)}
    return [
        phrases.waiting(context, absence.edges),
        f"{capital(others)}." if others else "",
        phrases.waiting_behind(context, sorted(direct), set(absence.blocked) - set(absence.ranks)),
    ]


def signs(absence: Absence) -> list[str]:
    """``"rank 2: its stack does not move and it uses no CPU."``; ranks with the same signs share a
    sentence: ``"ranks 2-3, each: ..."``.
    """
    same: dict[str, list[int]] = defaultdict(list)
    for rank, doing in zip(absence.ranks, absence.activities, strict=True):
        if doing.signs:
            same[joined(sign_words(doing.signs))].append(rank)
    return [
        f"{ranks_phrase(ranks)}{verb(ranks, '', ', each')}: {text}." for text, ranks in same.items()
    ][:4]
