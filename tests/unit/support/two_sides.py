"""Sentences that name two sides with the same words, and so tell no difference between them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from commlens.model.verdict import Verdict

_PIVOTS = re.compile(
    r",? where |, not (?=to |the |at )|, and (?=the other|ranks? )| against | with (?=\S+:\d)"
    r"|, (?=the others|ranks? \d)|; | instead of | while "
)
"""Between the words about one side and those about the other."""
_SIDES = re.compile(
    r"\b(?:the others?|others?|one side|(?<!from )(?<!to )(?<!for )ranks? \d[\d,-]*)(?: alone)?\b"
    r"|#\d+|\(pid \d+\)|\(ranks? [\d,-]+\)",
    re.IGNORECASE,
)
"""Names of sides, and numbers of collectives: these differ where the sides do the same."""
_SAY_NOTHING = frozenset(
    [
        "a",
        "an",
        "the",
        "to",
        "of",
        "on",
        "in",
        "at",
        "is",
        "are",
        "was",
        "were",
        "it",
        "its",
        "they",
        "their",
        "that",
        "this",
        "time",
        "as",
        "before",
        "find",
        "out",
        "why",
        "compare",
        "moved",
        "come",
        "comes",
        "came",
        "issue",
        "issues",
        "issued",
        "pass",
        "passes",
        "enter",
        "make",
        "makes",
        "look",
        "for",
        "and",
        "branch",
        "takes",
        "verdict",
        "why",
        "next",
    ]
)


def _tells(clause: str) -> list[str]:
    words = re.findall(r"[^\s,.;()]+(?:\.[^\s,.;()]+)*", _SIDES.sub(" ", clause).lower())
    return [word for word in words if word not in _SAY_NOTHING]


def same_on_both_sides(sentences: Iterable[str]) -> list[str]:
    """Return the sentences in which two neighbouring clauses tell the same of two sides."""
    found = []
    for sentence in sentences:
        told = [_tells(clause) for clause in _PIVOTS.split(sentence)]
        if any(one and one == other for one, other in pairwise(told)):
            found.append(sentence)
    return found


def tell_sides_apart(verdict: Verdict) -> bool:
    """Return whether each sentence of all findings of a verdict does so."""
    texts = [
        text
        for one in verdict.findings
        for text in (one.summary, one.explanation, one.next_step, *one.evidence)
    ]
    return not same_on_both_sides(sentence for text in texts for sentence in split(text))


def split(text: str) -> list[str]:
    """Split a text into sentences."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
