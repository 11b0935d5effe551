"""Which optimizer steps to trace: ``"2:4"``."""

from __future__ import annotations

from commlens.errors import CommandError


def parse_steps(steps: str | range | tuple[int, int | None] | None) -> tuple[int, int | None] | None:
    """First step and the one after the last, counted from 0 as a slice does: ``"2:4"`` is steps 2 and 3, ``"2:"`` all from 2 on.

    A lone number is that one step. None means all steps.

    Raises:
        CommandError: it is none of these.
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
    raise CommandError(f"Steps are given as FIRST:LAST, for example 2:4 for steps 2 and 3, counted from 0; {steps!r} is not that.")
