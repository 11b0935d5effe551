"""Ranges of optimizer steps, counted from 0 and written as in a slice. Standard library only."""

from __future__ import annotations

import re
from typing import Final

ALL: Final = range(1 << 62)
_WRITTEN: Final = re.compile(r"(\d+)|(\d*):(\d*)")


def parse_steps(text: str) -> range:
    """Return the steps of ``"2:4"`` (2 and 3), ``":4"``, ``"2:"`` (all from 2 on) or ``"2"``.

    Raises:
        ValueError: the text is none of these, or no step is in the range.
    """
    written = _WRITTEN.fullmatch(text.strip())
    if written is None:
        raise ValueError(f"not a range of steps: {text[:80]!r}")
    one, first, end = written.groups()
    if one is not None:
        return range(int(one), int(one) + 1)
    steps = range(int(first or 0), int(end) if end else ALL.stop)
    if not steps:
        raise ValueError(f"no step is in the range {text[:80]!r}")
    return steps
