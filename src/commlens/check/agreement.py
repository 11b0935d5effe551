"""One answer for all ranks, where a value is the same on them.

In a fake world each rank reads what happens to be in its own buffer. What a collective gives all
ranks alike must be read alike, or ranks would go different ways that no real run takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from commlens.check.branches import Answers, Value


def common(answers: Mapping[int, Answers]) -> Answers:
    """Return the answers on which ranks agree: that of a rank that knows the value, else that of
    the first one.
    """
    found: Answers = {}
    for _, own in sorted(answers.items()):
        for key, given in own.items():
            known = found.setdefault(key, [])
            for place, answer in enumerate(given):
                if place == len(known):
                    known.append(answer)
                elif answer[1] and not known[place][1]:
                    known[place] = answer
    return found


def disagreeing(answers: Mapping[int, Answers], agreed: Answers) -> list[int]:
    """Return the ranks that got another answer somewhere."""
    return [
        rank
        for rank, own in sorted(answers.items())
        if any(
            _identity(mine) != _identity(theirs)
            for key, given in own.items()
            for (mine, _), (theirs, _) in zip(given, agreed[key], strict=False)
        )
    ]


def _identity(value: Value) -> str:
    return repr(value)  # NaN equals NaN
