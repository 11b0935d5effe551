"""Parsing of the optimizer steps to trace: ``"2:4"``."""

from __future__ import annotations

from commlens.errors import CommandError


def parse_steps(steps: str | range | tuple[int, int | None] | None) -> tuple[int, int | None] | None:
    """Return the first step and the end, as in a slice: ``"2:4"`` is steps 2 and 3, ``"2:"`` all from 2 on.

    A single number is that one step. None means all steps.

    Raises:
        CommandError: not a range of steps.
    """
    if steps is None or isinstance(steps, tuple):
        return steps
    if isinstance(steps, range):
        if steps.step == 1:
            return steps.start, steps.stop
    else:
        first, colon, last = steps.strip().partition(":")
        try:
            start = int(first or 0)
            stop = int(last) if last else None if colon else start + 1
        except ValueError:
            pass
        else:
            if start >= 0 and (stop is None or stop > start):
                return start, stop
    raise CommandError(f"{steps!r} is not a range of steps: give FIRST:LAST counted from 0, for example 2:4 for steps 2 and 3.")
